"""Quantities: the spellings that the API server stores as they are, and what never happens to a value."""

import re
from decimal import ROUND_UP, Decimal

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from operator_app.api.quantity import canonical, value_of

LARGEST = 2**63 - 1
FACTORS = (
    {suffix: Decimal(10) ** exponent for suffix, exponent in zip("num", (-9, -6, -3), strict=True)}
    | {suffix: Decimal(1000) ** power for power, suffix in enumerate(["", *"kMGTPE"])}
    | {f"{suffix}i": Decimal(1024) ** (power + 1) for power, suffix in enumerate("KMGTPE")}
    | {f"{letter}{exponent}": Decimal(10) ** int(exponent) for letter in "eE" for exponent in ("0", "2", "+18", "-5")}
)


@st.composite
def quantities(draw: st.DrawFn) -> str:
    """Any quantity that the API's grammar knows."""
    whole = draw(st.text("0123456789", max_size=20))
    part = draw(st.text("0123456789", max_size=12))
    number = draw(st.sampled_from([whole, f"{whole}.", f"{whole}.{part}"]))
    if not any(each.isdigit() for each in number):
        number = f"7{number}"
    sign, suffix = draw(st.sampled_from(["", "+", "-"])), draw(st.sampled_from(list(FACTORS)))
    return f"{sign}{number}{suffix}"


# Each line was given to resource.Quantity of k8s.io/apimachinery v0.36 and to the rounding of a ResourceList.
@pytest.mark.parametrize(
    ("text", "stored"),
    [
        # no fraction, and the largest suffix that keeps the number whole
        ("0.5", "500m"),
        (".5", "500m"),
        ("5.", "5"),
        ("1.5", "1500m"),
        ("1000m", "1"),
        ("1500m", "1500m"),
        ("12000m", "12"),
        ("2", "2"),
        ("1024000", "1024k"),
        ("1000Mi", "1000Mi"),
        ("1000M", "1G"),
        # binary suffixes
        ("0.25Gi", "256Mi"),
        ("1024Ki", "1Mi"),
        ("1.5Gi", "1536Mi"),
        ("1Ki", "1Ki"),
        ("1536", "1536"),
        ("1024", "1024"),
        ("2048Mi", "2Gi"),
        # too small for a binary suffix, or no whole number of bytes
        ("0.5Ki", "512"),
        ("0.0001Ki", "103m"),
        ("1.0001Ki", "1024103m"),
        ("0.0001Ei", "115292150460684698m"),
        # the exponent form stays, at multiples of three
        ("1e3", "1e3"),
        ("1E3", "1e3"),
        ("12e2", "1200"),
        ("12e-1", "1200e-3"),
        ("100e-3", "100e-3"),
        ("1e0", "1"),
        # finer than milli: every ResourceList is rounded away from zero
        ("100u", "1m"),
        ("1n", "1m"),
        ("1e-9", "1e-3"),
        ("1.0001", "1001m"),
        ("-0.0001", "-1m"),
        # nothing at all, in every spelling
        ("0", "0"),
        ("0Ki", "0"),
        ("-0.0", "0"),
        ("0e3", "0"),
        ("0E", "0"),
        # signs and zeros that say nothing
        ("+5", "5"),
        ("007", "7"),
        ("1.500", "1500m"),
        ("-1Ki", "-1Ki"),
        ("  1  ", "1"),
        # no further than 2**63-1
        ("8Ei", "9223372036854775807"),
        ("-8Ei", "-9223372036854775807"),
        ("7Ei", "7Ei"),
        ("9223372036854775807", "9223372036854775807"),
        ("9223372036854775808", "9223372036854775807"),
        ("10E", "9223372036854775807"),
        ("1e99", "9223372036854775807"),
    ],
)
def test_the_spelling_that_is_stored(text: str, stored: str) -> None:
    """A quantity is spelled as the API server stores it, so that sending it again changes nothing."""
    assert canonical(text) == stored


@pytest.mark.parametrize(
    "text",
    [
        "",
        " ",
        "abc",
        "m",
        "e3",
        "1x",
        "1ki",
        "1K",
        "1KI",
        "1mi",
        "1ee3",
        "1e",
        "1e1.5",
        "--1",
        "+-1",
        "1.2.3",
        "1 Mi",
        "0x1",
        "NaN",
        "inf",
        "1_000",
        "1,5",
        "\u0661",
        "1\n2",
        ".",
    ],
)
def test_what_is_no_quantity_is_refused_in_a_sentence(text: str) -> None:
    """Anything else is a ValueError that quotes it and says what to write."""
    with pytest.raises(ValueError, match=re.escape(f"{text!r} is not a quantity; write for example 500m")):
        canonical(text)
    with pytest.raises(ValueError, match="is not a quantity"):
        value_of(text)


@pytest.mark.parametrize(
    ("text", "value"),
    [("500m", "0.5"), ("2", "2"), ("1Ki", "1024"), ("1.5k", "1500"), ("2e-1", "0.2"), ("-3M", "-3000000"), ("0", "0")],
)
def test_the_value_is_in_base_units(text: str, value: str) -> None:
    """Cores and bytes, exactly."""
    assert value_of(text) == Decimal(value)


@given(quantities())
@example("0.001Ei")
def test_a_stored_spelling_is_final(text: str) -> None:
    """Canonical twice is canonical once: a declaration that came back from the server would not change again."""
    assert canonical(canonical(text)) == canonical(text)


@given(quantities())
def test_a_spelling_keeps_the_value(text: str) -> None:
    """The value stays, up to milli and rounded away from zero, so that nobody gets less than was asked for."""
    number, suffix = re.fullmatch(r"([-+0-9.]+)(.*)", text).groups()  # type: ignore[union-attr]
    exact = Decimal(number) * FACTORS[suffix]
    expected = max(-Decimal(LARGEST), min(Decimal(LARGEST), exact))
    if abs(expected) < LARGEST:
        expected = expected.quantize(Decimal("0.001"), rounding=ROUND_UP)
    assert value_of(canonical(text)) == value_of(text) == expected


@given(quantities())
def test_a_stored_spelling_has_neither_fraction_nor_superfluous_signs(text: str) -> None:
    """No point, no plus, no leading zero, no exponent that is not a multiple of three, no suffix finer than milli."""
    match = re.fullmatch(r"-?(0|[1-9][0-9]*)([mkMGTPE]|[KMGTPE]i|e-?([0-9]+))?", canonical(text))
    assert match is not None
    assert match[3] is None or int(match[3]) % 3 == 0
