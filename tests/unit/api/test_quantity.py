"""The canonical form of quantities, which the API server stores unchanged."""

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
    """Any quantity of the API's grammar."""
    whole = draw(st.text("0123456789", max_size=20))
    part = draw(st.text("0123456789", max_size=12))
    number = draw(st.sampled_from([whole, f"{whole}.", f"{whole}.{part}"]))
    if not any(each.isdigit() for each in number):
        number = f"7{number}"
    sign, suffix = draw(st.sampled_from(["", "+", "-"])), draw(st.sampled_from(list(FACTORS)))
    return f"{sign}{number}{suffix}"


# Each expectation is the output of resource.Quantity of k8s.io/apimachinery v0.36 and of a ResourceList's rounding.
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
        # zero in every form
        ("0", "0"),
        ("0Ki", "0"),
        ("-0.0", "0"),
        ("0e3", "0"),
        ("0E", "0"),
        # superfluous signs and zeros
        ("+5", "5"),
        ("007", "7"),
        ("1.500", "1500m"),
        ("-1Ki", "-1Ki"),
        ("  1  ", "1"),
        # capped at 2**63-1
        ("8Ei", "9223372036854775807"),
        ("-8Ei", "-9223372036854775807"),
        ("7Ei", "7Ei"),
        ("9223372036854775807", "9223372036854775807"),
        ("9223372036854775808", "9223372036854775807"),
        ("10E", "9223372036854775807"),
        ("1e99", "9223372036854775807"),
    ],
)
def test_the_canonical_form_is_the_stored_one(text: str, stored: str) -> None:
    """A quantity is converted to the form that the API server stores, so that a second apply is a no-op."""
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
def test_a_text_that_is_no_quantity_is_refused(text: str) -> None:
    """Any other text raises ``ValueError`` with the text and examples of quantities."""
    with pytest.raises(ValueError, match=re.escape(f"{text!r} is not a quantity; write for example 500m")):
        canonical(text)
    with pytest.raises(ValueError, match="is not a quantity"):
        value_of(text)


@pytest.mark.parametrize(
    ("text", "value"),
    [("500m", "0.5"), ("2", "2"), ("1Ki", "1024"), ("1.5k", "1500"), ("2e-1", "0.2"), ("-3M", "-3000000"), ("0", "0")],
)
def test_the_value_is_in_base_units(text: str, value: str) -> None:
    """The value is exact, in cores or bytes."""
    assert value_of(text) == Decimal(value)


@given(quantities())
@example("0.001Ei")
def test_the_canonical_form_is_a_fixed_point(text: str) -> None:
    """The canonical form of a canonical quantity is the quantity itself."""
    assert canonical(canonical(text)) == canonical(text)


@given(quantities())
def test_the_canonical_form_keeps_the_value(text: str) -> None:
    """The value is kept, rounded away from zero to milli and capped, so that it is never less than requested."""
    number, suffix = re.fullmatch(r"([-+0-9.]+)(.*)", text).groups()  # type: ignore[union-attr]
    exact = Decimal(number) * FACTORS[suffix]
    expected = max(-Decimal(LARGEST), min(Decimal(LARGEST), exact))
    if abs(expected) < LARGEST:
        expected = expected.quantize(Decimal("0.001"), rounding=ROUND_UP)
    assert value_of(canonical(text)) == value_of(text) == expected


@given(quantities())
def test_the_canonical_form_has_no_fraction_and_no_superfluous_characters(text: str) -> None:
    """No point, plus, leading zero, exponent that is not a multiple of three, or suffix finer than milli."""
    match = re.fullmatch(r"-?(0|[1-9][0-9]*)([mkMGTPE]|[KMGTPE]i|e-?([0-9]+))?", canonical(text))
    assert match is not None
    assert match[3] is None or int(match[3]) % 3 == 0
