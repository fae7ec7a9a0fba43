"""Budget, autoscaler and network policy come and go through every fault of the requests that make and delete them."""

import uuid
from typing import Any, Final

import pytest

from operator_app.api.kinds import DEPLOYMENT, ENVOY_PROXY, OPTIONAL_CHILD_KINDS, Key, Kind
from operator_app.desired import child_key
from tests.e2e.faults.campaign import Campaign
from tests.e2e.faults.plan import KILLS, Fault, FaultKind, Plan, Point, applicable
from tests.e2e.kube import Kube
from tests.e2e.proxies import a_proxy, drift_of, objects_of, wait_reconciled

STANZAS: Final[dict[str, Any]] = {
    "disruption": {"maxUnavailable": 2},
    "autoscaling": {"minReplicas": 1, "maxReplicas": 3},
    "networkPolicy": {},
}
RESOURCES: Final[dict[str, Any]] = {"resources": {"requests": {"cpu": "100m"}}}
VERBS: Final = ("apply", "delete")
FAULTS: Final = tuple(each for each in applicable(Point("apply", "")) if each not in KILLS)
RESYNC: Final = "--sweep-interval-s=2"
"""Some refusals are told, and tried again by a resync alone."""
TIMEOUT_S: Final = 180.0

Made = dict[Key, tuple[Fault, ...]]


@pytest.fixture
def made(admin: Kube) -> Made:
    """A namespace for each fault with the key of its proxy: one kind is made under it, and another one deleted."""
    proxies: Made = {}
    for number, fault in enumerate(FAULTS):
        key = Key(f"optional-{uuid.uuid4().hex[:10]}", "web")
        admin.create_namespace(key.namespace)
        proxies[key] = tuple(
            Fault(f"{key.namespace} {verb}", fault, Point(verb, kind_of(number + offset).kind), key.namespace)
            for offset, verb in enumerate(VERBS)
        )
    return proxies


def kind_of(number: int) -> Kind:
    """The kinds in turn."""
    return OPTIONAL_CHILD_KINDS[number % len(OPTIONAL_CHILD_KINDS)]


@pytest.mark.timeout(900)
def test_every_fault_of_their_requests_is_survived(admin: Kube, campaign: Campaign, made: Made) -> None:
    """After any fault of a create, and of a deletion: what is declared is there, once, and what is not is gone."""
    faults = tuple(each for faults in made.values() for each in faults)
    with campaign:
        campaign.start_operator(Plan(faults), RESYNC)
        for key in made:
            admin.create(ENVOY_PROXY, a_proxy(key.namespace, replicas=1, **RESOURCES, **STANZAS))
        for key in made:
            wait_as_declared(admin, key)
            assert {*objects_of(admin, key).optional} == {*OPTIONAL_CHILD_KINDS}, made[key]
        for key in made:
            admin.patch(ENVOY_PROXY, key, {"spec": dict.fromkeys(STANZAS)})
        for key in made:
            wait_as_declared(admin, key)
            for kind in OPTIONAL_CHILD_KINDS:
                admin.wait_gone(kind, child_key(key))
        injected = {each["injected"] for each in campaign.notices() if "injected" in each}
        assert injected == {each.id for each in faults}
        campaign.stop()
    assert campaign.complaints == []


@pytest.mark.timeout(900)
def test_a_crash_behind_each_of_their_writes_is_made_good(admin: Kube, campaign: Campaign, namespace: str) -> None:
    """``kill -9`` right behind each create and each deletion; the next start finishes what was begun."""
    steps = [(Key(namespace, f"web-{number}"), kind_of(number), verb) for number in range(3) for verb in VERBS]
    with campaign:
        for number, (key, kind, verb) in enumerate(steps):
            kill = Fault(f"{number}", FaultKind.KILL_BEHIND, Point(verb, kind.kind), namespace)
            # This start also finishes what the one before began.
            campaign.start_operator(Plan((kill,)))
            if number:
                finished(admin, *steps[number - 1])
            if verb == "apply":
                admin.create(ENVOY_PROXY, a_proxy(namespace, key.name, replicas=1, **RESOURCES, **STANZAS))
            else:
                admin.patch(ENVOY_PROXY, key, {"spec": dict.fromkeys(STANZAS)})
            campaign.wait_killed([])
            is_there = admin.find(kind, child_key(key)) is not None
            assert is_there == (verb == "apply"), "the crash came behind the intended write"
        campaign.start_operator()
        finished(admin, *steps[-1])
        campaign.stop()
    assert campaign.complaints == []


def finished(admin: Kube, key: Key, kind: Kind, verb: str) -> None:
    """Check a proxy after the restart that follows a crash behind that write."""
    wait_as_declared(admin, key)
    found = objects_of(admin, key)
    assert {*found.optional} == ({*OPTIONAL_CHILD_KINDS} if verb == "apply" else set()), kind
    assert found.children[DEPLOYMENT]["spec"]["replicas"] == 1


def wait_as_declared(admin: Kube, key: Key) -> None:
    """Wait until a proxy's status says that all is as declared, and see by the API server whether it is."""
    wait_reconciled(admin, key, TIMEOUT_S)
    assert drift_of(admin, key) == {}
