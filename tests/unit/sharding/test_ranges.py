"""Shards as ranges of the API server's hash: the hash itself, cuts that balance, and when other cuts are worth it."""

from string import ascii_lowercase
from typing import Final

import pytest
from hypothesis import given
from hypothesis import strategies as st

from operator_app.kube.hash_ranges import ALL_HASHES, HASHES, HashRange, hash_of, is_covered
from operator_app.sharding.ranges import Ranges, balanced, better

ALIKE: Final = {f"team-{letter}": 10 for letter in ascii_lowercase}
"""Namespaces that all have neighbouring hashes."""

fleets = st.dictionaries(st.from_regex(r"[a-z0-9-]{1,20}", fullmatch=True), st.integers(0, 50), max_size=60)
divisions = st.integers(1, 32)


@pytest.mark.parametrize(
    ("name", "expected"),
    [("", 0xCBF29CE484222325), ("a", 0xAF63DC4C8601EC8C), ("foobar", 0x85944171F73967E8)],
)
def test_the_hash_is_fnv_1a(name: str, expected: int) -> None:
    """The published test vectors of FNV-1a with 64 bits; the API server's own answers are in the e2e tests."""
    assert hash_of(name) == expected


def test_names_that_are_alike_are_in_one_of_many_even_ranges() -> None:
    """Why ranges of one length don't do: all 26 are in one of 3,072."""
    assert len({hash_of(name) * 3_072 // HASHES for name in ALIKE}) == 1


@given(fleets, divisions)
def test_every_namespace_is_in_the_range_of_its_shard_and_in_no_other(proxies: dict[str, int], shards: int) -> None:
    """Whatever the cuts, and what is written into the Lease is read as the same division."""
    ranges = balanced(proxies, shards)
    assert ranges.shards == shards
    for namespace in (*proxies, "another", ""):
        holding = [shard for shard in range(shards) if namespace in ranges.range_of(shard)]
        assert holding == [ranges.shard_of(namespace)]
    assert Ranges.of_text(ranges.text, shards) == ranges
    assert ranges.number not in (0, shards)


@given(fleets, divisions)
def test_no_shard_is_larger_than_its_part_and_two_namespaces(proxies: dict[str, int], shards: int) -> None:
    """A namespace is never divided, so at both of a shard's cuts up to one namespace may be too much."""
    total, largest = sum(proxies.values()), max(proxies.values(), default=0)
    assert balanced(proxies, shards).largest(proxies) <= total / shards * 1.03 + 2 * largest


def test_namespaces_that_are_alike_are_divided_evenly() -> None:
    """26 namespaces of 10 proxies over 6 shards: four or five in each."""
    ranges = balanced(ALIKE, 6)
    sizes = [sum(ranges.shard_of(name) == shard for name in ALIKE) for shard in range(6)]
    assert sorted(sizes) == [4, 4, 4, 4, 5, 5]


def test_an_empty_cluster_is_divided_into_ranges_of_one_length() -> None:
    """Nothing is known of the names to come."""
    assert balanced({}, 4).cuts == (HASHES // 4, HASHES // 2, HASHES * 3 // 4)


def test_other_cuts_have_to_be_worth_it() -> None:
    """Not for a fleet that only grows evenly, not for a few proxies, and not where one namespace is the reason."""
    assert better(balanced({}, 6), ALIKE) == balanced(ALIKE, 6)
    assert better(balanced(ALIKE, 6), dict.fromkeys(ALIKE, 30)) is None
    assert better(balanced(ALIKE, 6), ALIKE | {"team-a": 17}) is None
    assert better(balanced({}, 6), dict.fromkeys(list(ALIKE)[:9], 1)) is None
    assert better(balanced({}, 6), {"one": 5_000}) is None


@pytest.mark.parametrize("text", ["", "12", "z" * 16, f"{5:016x},{4:016x}", f"{HASHES + 1:017x},{HASHES + 1:017x}"])
def test_cuts_that_no_replica_can_have_written_are_none(text: str) -> None:
    """Edited by hand: too few, no numbers, descending, or beyond all hashes."""
    assert Ranges.of_text(text, 3) is None


def test_different_divisions_have_different_numbers() -> None:
    """Leases tell by it that two replicas divide the namespaces differently."""
    assert len({balanced({}, 6).number, balanced(ALIKE, 6).number, balanced({}, 7).number, 6, 7}) == 5


def test_what_a_watch_covers() -> None:
    """All namespaces, one, or those in a range; between equal cuts there is nothing."""
    assert is_covered("team-a", None)
    assert is_covered("team-a", "team-a")
    assert not is_covered("team-a", "team-b")
    assert is_covered("team-a", ALL_HASHES)
    own = HashRange(hash_of("team-a"), hash_of("team-a") + 1)
    assert (is_covered("team-a", own), is_covered("team-b", own)) == (True, False)
    assert HashRange(5, 5).is_empty
    assert ALL_HASHES.selector == "shardRange(object.metadata.namespace, '0x0000000000000000', '0x10000000000000000')"
