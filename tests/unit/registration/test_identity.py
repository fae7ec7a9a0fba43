"""Which installation and cluster a record belongs to, and what an installation may take for its own."""

import uuid

from hypothesis import given
from hypothesis import strategies as st

from operator_app.registration.identity import DIGEST_LENGTH, Installation

IDS = st.from_regex(r"[a-z0-9]([-a-z0-9]{0,20}[a-z0-9])?", fullmatch=True)
OURS = Installation.of("cluster-one", "prod")


@given(st.uuids().map(str), IDS)
def test_the_text_tells_neither_the_cluster_nor_the_id(cluster_uid: str, operator_id: str) -> None:
    """Both parts are digests of a fixed length; the text is parsed to the same installation."""
    found = Installation.of(cluster_uid, operator_id)
    assert {len(found.cluster), len(found.name)} == {DIGEST_LENGTH}
    assert cluster_uid not in str(found)
    assert Installation.parsed(str(found)) == found


def test_clusters_and_ids_tell_installations_apart() -> None:
    """One id in two clusters, and two ids in one cluster, are different installations."""
    same_cluster, same_id = Installation.of("cluster-one", "test"), Installation.of("cluster-two", "prod")
    assert len({OURS.name, same_cluster.name, same_id.name}) == 3
    assert OURS.is_same_cluster(same_cluster)
    assert not OURS.is_same_cluster(same_id)


def test_only_an_installation_of_the_same_cluster_is_a_former_one() -> None:
    """What a ledger names of another cluster was restored or copied from there, and stays somebody else's."""
    before = Installation.of("cluster-one", "test")
    listed = [str(OURS), str(before), str(Installation.of("cluster-two", "prod")), "", str(uuid.uuid4())]
    assert OURS.former(listed) == {before}
