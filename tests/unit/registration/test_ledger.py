"""A ledger entry: which names it lists, and whether the registry has confirmed it."""

import pytest

from operator_app.api.kinds import Object
from operator_app.registration.ledger import IN_CLUSTER, LedgerEntry, Name
from tests.unit.registration.ledger_entries import an_entry


@pytest.mark.parametrize(
    ("spec", "published", "names"),
    [
        ({}, None, set()),
        ({"hostname": "a.b"}, Name("dns", "a.b"), {Name("dns", "a.b")}),
        ({"hostname": "a.b", "registry": IN_CLUSTER}, None, set()),
        (
            {"hostname": "a.b", "registry": IN_CLUSTER, "retiring": [{"registry": "dns", "hostname": "c.d"}]},
            None,
            {Name("dns", "c.d")},
        ),
        (
            {"hostname": "a.b", "retiring": [{"registry": "old", "hostname": "a.b"}]},
            Name("dns", "a.b"),
            {Name("dns", "a.b"), Name("old", "a.b")},
        ),
    ],
)
def test_an_entry_lists_every_name_that_may_be_published(
    spec: Object, published: Name | None, names: set[Name]
) -> None:
    """The hostname in an outside registry and all retiring names; ``in-cluster`` publishes nothing."""
    entry = LedgerEntry(an_entry(**spec))
    assert entry.published == published
    assert entry.names == names


@pytest.mark.parametrize(
    ("status", "is_confirmed"), [({}, False), ({"confirmedGeneration": 2}, False), ({"confirmedGeneration": 3}, True)]
)
def test_an_entry_is_confirmed_for_exactly_one_generation(status: Object, *, is_confirmed: bool) -> None:
    """The confirmation of an older spec, with another address for instance, does not count for this one."""
    assert LedgerEntry(an_entry() | {"status": status}).is_confirmed is is_confirmed
