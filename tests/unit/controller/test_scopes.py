"""Scopes: what is watched for the served namespaces, and when each of them is synced."""

from operator_app.api.kinds import (
    CONFIG_MAP,
    ENVOY_PROXY,
    HOSTNAME_CLAIM,
    LABEL_TENANT,
    NAMESPACE,
    PROXY_REGISTRATION,
    Kind,
)
from operator_app.controller.scopes import INDEXES, MANAGED_BY_US, Scopes
from operator_app.kube.deltas import Listed
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
    assert scopes[ENVOY_PROXY] == {"namespace": None, "labels": None}
    assert scopes[NAMESPACE] == {"namespace": None, "labels": LABEL_TENANT}
    assert scopes[CONFIG_MAP] == {"namespace": None, "labels": MANAGED_BY_US}
    assert scopes[PROXY_REGISTRATION] == {"namespace": "edge-system", "labels": MANAGED_BY_US}


def test_served_namespaces_have_scopes_of_their_own_and_share_the_records() -> None:
    """Each kind is watched once in each served namespace, records once, and Namespaces not at all."""
    watched = [(kind, scope["namespace"]) for kind, scope in scopes_of("b", "a")[1]]
    assert [each for each in watched if each[0] == ENVOY_PROXY] == [(ENVOY_PROXY, "a"), (ENVOY_PROXY, "b")]
    assert [each for each in watched if each[0] == HOSTNAME_CLAIM] == [(HOSTNAME_CLAIM, "edge-system")]
    assert NAMESPACE not in dict(watched)


def test_a_namespace_is_synced_once_every_kind_is_listed_for_it() -> None:
    """It is reported as newly synced once, and another namespace that is not listed does not delay it."""
    store, scopes = scopes_of("a", "b")
    for kind in (HOSTNAME_CLAIM, PROXY_REGISTRATION):
        listed(store, kind, "edge-system")
    local = [kind for kind, scope in scopes if scope["namespace"] == "a"]
    for kind in local[:-1]:
        listed(store, kind, "a")
        assert scopes.newly_synced() == ()
    assert not scopes.is_any_synced
    listed(store, local[-1], "a")
    assert scopes.newly_synced() == ("a",)
    assert scopes.newly_synced() == ()
    assert (scopes.is_synced("a"), scopes.is_synced("b"), scopes.is_any_synced) == (True, False, True)


def test_a_synced_cluster_has_every_namespace_synced() -> None:
    """Without chosen namespaces the whole cluster is synced at once."""
    store, scopes = scopes_of()
    for kind, scope in scopes:
        assert scopes.newly_synced() == ()
        listed(store, kind, scope["namespace"])
    assert scopes.newly_synced() == (None,)
    assert scopes.is_synced("any")
