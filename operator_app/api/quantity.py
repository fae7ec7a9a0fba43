"""Resource quantities in the canonical form that the API server stores. Pure.

The API server stores ``0.5`` as ``500m``. A desired object with ``0.5`` would differ from the stored object after every
apply, so desired objects contain only canonical quantities.
"""

import re
from decimal import ROUND_UP, Context, Decimal
from typing import Final

_PATTERN: Final = re.compile(
    r"(?P<number>[+-]?(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+))(?P<suffix>[KMGTPE]i|[numkMGTPE]|[eE][+-]?[0-9]+)?"
)
_DECIMAL_EXPONENTS: Final = {"n": -9, "u": -6, "m": -3, "": 0, "k": 3, "M": 6, "G": 9, "T": 12, "P": 15, "E": 18}
_DECIMAL_SUFFIXES: Final = {exponent: suffix for suffix, exponent in _DECIMAL_EXPONENTS.items()}
_BINARY_SUFFIXES: Final = ("", "Ki", "Mi", "Gi", "Ti", "Pi", "Ei")
_MILLI: Final = Decimal("1e-3")
_LARGEST: Final = Decimal(2**63 - 1)
_EXACT: Final = Context(prec=60)


def canonical(text: str) -> str:
    """The canonical form of ``text``, which the API server stores unchanged.

    Follows the rules of ``resource.Quantity.CanonicalizeBytes`` in k8s.io/apimachinery: no fraction, the largest
    suffix that keeps the number whole, binary suffixes only for whole values of at least 1024, the exponent form
    kept if it was used. Values finer than milli are rounded away from zero, as every ``ResourceList`` is by
    ``SetDefaults_ResourceList`` in k8s.io/kubernetes. Values beyond 2**63-1 are capped, which the API server does for
    binary suffixes only; most of the other values have no canonical form that it stores unchanged.

    Raises ``ValueError`` if ``text`` is not a quantity.
    """
    value, suffix = _parsed(text)
    if value == 0:
        return "0"
    if suffix.endswith("i") and abs(value) >= 1024 and value == value.to_integral_value(context=_EXACT):
        return _binary(int(value))
    return _decimal(value, exponent_form=suffix not in _DECIMAL_EXPONENTS and not suffix.endswith("i"))


def value_of(text: str) -> Decimal:
    """The value of ``text`` in base units (cores, bytes). Raises ``ValueError`` if ``text`` is not a quantity."""
    return _parsed(text)[0]


def _parsed(text: str) -> tuple[Decimal, str]:
    match = _PATTERN.fullmatch(text.strip())
    if match is None:
        message = f"{text!r} is not a quantity; write for example 500m, 2 or 256Mi"
        raise ValueError(message)
    number, suffix = Decimal(match["number"]), match["suffix"] or ""
    if suffix.endswith("i"):
        value = _EXACT.multiply(number, Decimal(1024 ** _BINARY_SUFFIXES.index(suffix)))
    elif suffix in _DECIMAL_EXPONENTS:
        value = number.scaleb(_DECIMAL_EXPONENTS[suffix], context=_EXACT)
    else:
        value = number.scaleb(int(suffix[1:]), context=_EXACT)
    if value != 0:
        value = value.quantize(_MILLI, rounding=ROUND_UP, context=_EXACT) if abs(value) < _LARGEST else value
        value = max(-_LARGEST, min(_LARGEST, value))
    return value, suffix


def _decimal(value: Decimal, *, exponent_form: bool) -> str:
    sign, digits, raw_exponent = value.normalize(_EXACT).as_tuple()
    exponent = int(raw_exponent)
    # Suffixes exist for multiples of three only, so the mantissa takes the remaining power of ten.
    shift = exponent % 3
    mantissa = int("".join(map(str, digits))) * 10**shift
    exponent -= shift
    text = f"-{mantissa}" if sign else str(mantissa)
    if exponent_form:
        return text if exponent == 0 else f"{text}e{exponent}"
    return text + _DECIMAL_SUFFIXES[exponent]


def _binary(value: int) -> str:
    power = 0
    while value % 1024 == 0 and power < len(_BINARY_SUFFIXES) - 1:
        value //= 1024
        power += 1
    return f"{value}{_BINARY_SUFFIXES[power]}"
