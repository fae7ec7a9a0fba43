"""Scopes: what is watched for the served namespaces, and when each of them is synced."""

import pytest

from operator_app.api.kinds import (
    CONFIG_MAP,
    ENVOY_PROXY,
    HOSTNAME_CLAIM,
    LABEL_TENANT,
    NAMESPACE,
    NODE,
    PROXY_REGISTRATION,
    Key,
    Kind,
    Object,
    key_of,
)
from operator_app.controller.scopes import INDEXES, KEPT, MANAGED_BY_US, Scopes, indexes_of
from operator_app.kube.deltas import Changed, Listed
from operator_app.kube.hash_ranges import Coverage
from operator_app.kube.store import Store


def scopes_of(*namespaces: str) -> tuple[Store, Scopes]:
    """The scopes of an operator in ``edge-system`` that serves these namespaces, and its store."""
    store = Store(INDEXES)
    return store, Scopes(store, namespace="edge-system", namespaces=namespaces)


def listed(store: Store, kind: Kind, namespace: str | None) -> None:
    """Let the store have an empty, complete list."""
    store.apply_delta(Listed(kind, namespace, (), "5", first=True, last=True))


def test_the_whole_cluster_is_one_scope_for_each_kind() -> None:
    """Proxies without a selector, tenants' Namespaces, records in the own namespace, and managed children."""
    scopes = dict(scopes_of()[1])
    assert set(scopes) == set(INDEXES)
    assert scopes[ENVOY_PROXY] == {"namespace": None, "labels": None, "hashes": None}
    assert scopes[NAMESPACE] == {"namespace": None, "labels": LABEL_TENANT, "hashes": None}
    assert scopes[CONFIG_MAP] == {"namespace": None, "labels": MANAGED_BY_US, "hashes": None}
    assert scopes[PROXY_REGISTRATION] == {"namespace": "edge-system", "labels": MANAGED_BY_US, "hashes": None}


def test_nodes_are_watched_only_where_their_addresses_are_published() -> None:
    """All of them, whichever namespaces are served; then no namespace is synced before they are known."""
    for namespaces in ((), ("a",)):
        store = Store(indexes_of("edge-system"))
        scopes = Scopes(store, namespace="edge-system", namespaces=namespaces, are_nodes_watched=True)
        assert dict(scopes)[NODE] == {"namespace": None, "labels": None, "hashes": None}
        assert NODE not in Scopes(store, namespace="edge-system", namespaces=namespaces).kinds
        for kind, scope in scopes:
            if kind != NODE:
                listed(store, kind, scope["namespace"])
                assert scopes.newly_synced(scope["namespace"]) == ()
        listed(store, NODE, None)
        assert scopes.newly_synced(None) == (namespaces or (None,))


def test_claims_of_other_operators_are_known_by_name_alone() -> None:
    """They are watched, since who waits for a hostname is woken by its end, and no proxy of ours is found by them."""
    store = Store(indexes_of("edge-system"))
    proxy = {"namespace": "team-a", "name": "web", "uid": "u"}
    for version, installation in (("5", "edge-system"), ("6", "edge-two")):
        metadata = {"name": f"{installation}.example.com", "uid": installation, "resourceVersion": version}
        store.learn(HOSTNAME_CLAIM, {"metadata": metadata, "spec": {"proxy": proxy, "installation": installation}})
    assert [each["metadata"]["uid"] for each in store.indexed(HOSTNAME_CLAIM, Key("team-a", "web"))] == ["edge-system"]
    assert len(store.keys(HOSTNAME_CLAIM)) == 2
    assert store.index_values(HOSTNAME_CLAIM) == (Key("team-a", "web"),)


def test_served_namespaces_have_scopes_of_their_own_and_share_the_records() -> None:
    """Each kind is watched once in each served namespace, records once, and Namespaces not at all."""
    watched = [(kind, scope["namespace"]) for kind, scope in scopes_of("b", "a")[1]]
    assert [each for each in watched if each[0] == ENVOY_PROXY] == [(ENVOY_PROXY, "a"), (ENVOY_PROXY, "b")]
    assert [each for each in watched if each[0] == HOSTNAME_CLAIM] == [(HOSTNAME_CLAIM, None)]
    assert NAMESPACE not in dict(watched)


def test_a_namespace_is_synced_once_every_kind_is_listed_for_it() -> None:
    """It is reported as newly synced once, and another namespace that is not listed does not delay it."""
    store, scopes = scopes_of("a", "b")
    for kind, scope in scopes:
        if scope["namespace"] not in ("a", "b"):
            listed(store, kind, scope["namespace"])
            assert scopes.newly_synced(scope["namespace"]) == ()
    local = [kind for kind, scope in scopes if scope["namespace"] == "a"]
    for kind in local[:-1]:
        listed(store, kind, "a")
        assert scopes.newly_synced("a") == ()
    assert not scopes.is_any_synced
    listed(store, local[-1], "a")
    assert scopes.newly_synced("a") == ("a",)
    assert scopes.newly_synced("a") == ()
    assert (scopes.is_synced("a"), scopes.is_synced("b"), scopes.is_any_synced) == (True, False, True)


@pytest.mark.parametrize("own", ["edge-system", "a"], ids=["apart", "among the served"])
def test_the_records_may_be_listed_last(own: str) -> None:
    """The list of the records, in the operator's own namespace, can be what makes all served namespaces synced."""
    store = Store(INDEXES)
    scopes = Scopes(store, namespace=own, namespaces=("a", "b"))
    records = (HOSTNAME_CLAIM, PROXY_REGISTRATION)
    places: dict[Kind, str | None] = {HOSTNAME_CLAIM: None, PROXY_REGISTRATION: own}
    for kind, scope in scopes:
        if kind not in records:
            listed(store, kind, scope["namespace"])
            assert scopes.newly_synced(scope["namespace"]) == ()
    listed(store, records[0], places[records[0]])
    assert scopes.newly_synced(places[records[0]]) == ()
    listed(store, records[1], places[records[1]])
    assert set(scopes.newly_synced(places[records[1]])) == {"a", "b"}


def test_a_synced_cluster_has_every_namespace_synced() -> None:
    """Without chosen namespaces the whole cluster is synced at once, whichever list comes last."""
    store, scopes = scopes_of()
    newly: list[Coverage] = []
    for kind, scope in scopes:
        assert not newly
        assert not scopes.is_any_synced
        listed(store, kind, scope["namespace"])
        newly += scopes.newly_synced(scope["namespace"])
    assert newly == [None]
    assert scopes.is_synced("any")


def test_the_work_at_a_start_is_linear_in_the_namespaces(monkeypatch: pytest.MonkeyPatch) -> None:
    """With twice the namespaces, the lists of a start ask the store at most about twice as often what is synced."""

    def asked(count: int) -> int:
        calls = 0
        store, scopes = scopes_of(*(f"n{number}" for number in range(count)))
        original = store.is_synced

        def counted(kind: Kind, namespace: str | None) -> bool:
            nonlocal calls
            calls += 1
            return original(kind, namespace)

        monkeypatch.setattr(store, "is_synced", counted)
        for kind, scope in scopes:
            listed(store, kind, scope["namespace"])
            scopes.newly_synced(scope["namespace"])
        return calls

    assert asked(200) < 2.2 * asked(100)


def test_of_a_proxy_everything_but_labels_and_annotations_is_kept() -> None:
    """What a schema can't bound and no reconcile reads takes no memory; field owners and finalizers stay."""
    metadata = {"name": "web", "namespace": "a", "resourceVersion": "5", "finalizers": ["x"], "managedFields": [{}]}
    noise = {"labels": {"a": "b"}, "annotations": {"a": "b" * 1000}}
    assert stored(ENVOY_PROXY, {"metadata": metadata | noise, "spec": {"replicas": 1}}) == {
        "metadata": metadata,
        "spec": {"replicas": 1},
    }


@pytest.mark.parametrize(
    ("kind", "kept"),
    [("EnvoyProxy", {"data": {"cds.json": "{}", "rds-http.json": "{}"}}), ("Other", {}), (None, {})],
    ids=str,
)
def test_of_a_config_map_only_the_configuration_of_a_proxy_is_kept(kind: str | None, kept: Object) -> None:
    """Keys that others add, and all data of a ConfigMap that only carries the operator's label, take no memory."""
    metadata: Object = {"name": "web-envoy", "namespace": "a", "resourceVersion": "5"}
    if kind is not None:
        metadata["ownerReferences"] = [{"kind": kind, "uid": "u", "controller": True}]
    noise = {"data": {"cds.json": "{}", "rds-http.json": "{}", "more": "x"}, "binaryData": {"b": "eA=="}}
    assert stored(CONFIG_MAP, {"metadata": metadata} | noise) == {"metadata": metadata} | kept


def stored(kind: Kind, obj: Object) -> Object | None:
    """What the store of an operator has of an object."""
    store = Store(INDEXES, KEPT)
    store.apply_delta(Changed(kind, obj))
    return store.get(kind, key_of(obj))
