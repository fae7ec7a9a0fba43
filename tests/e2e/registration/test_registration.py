"""Registration on a real API server: claims, the ledger, an outside registry with its faults, and every way to part."""

import time
from collections.abc import Iterator
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, Final

import httpx2
import pytest

from operator_app.api.kinds import (
    CHILD_KINDS,
    ENVOY_PROXY,
    FINALIZER,
    HOSTNAME_CLAIM,
    LABEL_MANAGED_BY,
    LABEL_OWNER_UID,
    NAMESPACE,
    PROXY_REGISTRATION,
    SERVICE,
    Key,
    Object,
)
from operator_app.desired import child_key
from operator_app.registration.registrar import Registries
from tests.e2e.components import Components, components
from tests.e2e.controlplane import AuditLog
from tests.e2e.faults.plan import Fault, FaultKind, Plan, Point
from tests.e2e.kube import Kube, wait_until
from tests.e2e.operator_process import OPERATOR_NAMESPACE, OperatorProcess
from tests.e2e.outside import FLAGS, NAME, TIMEOUT_S, FileRegistry, Outside
from tests.e2e.proxies import (
    OPERATOR_USER,
    a_proxy,
    condition,
    drift_of,
    holds,
    is_refused,
    leave_nothing,
    record_key,
    wait_all_gone,
    wait_reconciled,
)

QUIET_S: Final = 1.5
OPERATOR_ID: Final = "operator-app"


@pytest.fixture
def neighbour(admin: Kube, namespace: str) -> Iterator[str]:
    """The namespace of another tenant."""
    name = f"{namespace[:50]}-next"
    admin.create(NAMESPACE, {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name}})
    yield name
    leave_nothing(admin, name)


def named(namespace: str, name: str, hostname: str | None, **spec: Any) -> Object:
    """A proxy that wants a hostname."""
    registration = {"registration": {"hostname": hostname}} if hostname else {}
    return a_proxy(namespace, name, **registration, **spec)


def want(admin: Kube, key: Key, hostname: str) -> Object:
    """Edit the hostname that a proxy wants."""
    return admin.patch(ENVOY_PROXY, key, {"spec": {"registration": {"hostname": hostname}}})


def wait_registered(admin: Kube, key: Key, timeout_s: float = 20) -> Object:
    """The proxy once its record is confirmed for its generation."""
    return admin.wait_until(ENVOY_PROXY, key, holds("Registered"), timeout_s)


def holder(admin: Kube, hostname: str) -> str | None:
    """The UID that has a hostname."""
    claim = admin.find(HOSTNAME_CLAIM, Key(OPERATOR_NAMESPACE, hostname))
    return None if claim is None else str(claim["spec"]["proxy"]["uid"])


def record(admin: Kube, proxy: Object) -> Object:
    """The ledger's entry of a proxy."""
    return admin.get(PROXY_REGISTRATION, record_key(proxy))


# --- claims --------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("running_operator")
def test_the_first_keeps_a_hostname_and_the_second_gets_it_when_the_first_goes(
    admin: Kube, namespace: str, neighbour: str
) -> None:
    """``HostnameTaken`` says nothing about the holder; everything else of the second is served; then it takes over."""
    hostname = f"{namespace}.example.com"
    first, second = Key(namespace, "first"), Key(neighbour, "second")
    one = admin.create(ENVOY_PROXY, named(*first, hostname))
    wait_registered(admin, first)
    two = admin.create(ENVOY_PROXY, named(*second, hostname))

    refused = admin.wait_until(ENVOY_PROXY, second, is_refused("Registered", "HostnameTaken"))
    message = condition(refused, "Registered")["message"]
    assert hostname in message
    rest = message.replace(hostname, "")
    assert not any(secret in rest for secret in (one["metadata"]["uid"], "first", namespace))
    assert condition(refused, "Stalled")["reason"] == "HostnameTaken"
    assert condition(refused, "Reconciled")["status"] == "True"
    assert "hostname" not in record(admin, two)["spec"], "a record never says a name that is somebody else's"
    assert holder(admin, hostname) == one["metadata"]["uid"]

    admin.delete(ENVOY_PROXY, first)

    wait_registered(admin, second)
    assert holder(admin, hostname) == two["metadata"]["uid"]
    assert record(admin, two)["spec"]["hostname"] == hostname
    assert condition(admin.get(ENVOY_PROXY, second), "Stalled") == {}


@pytest.mark.usefixtures("running_operator")
def test_two_proxies_can_swap_their_hostnames(admin: Kube, namespace: str) -> None:
    """A name that is declared no longer is freed, even while the new one is still taken: nobody waits in a circle."""
    left, right = f"left.{namespace}.example.com", f"right.{namespace}.example.com"
    one, two = Key(namespace, "one"), Key(namespace, "two")
    uids = {}
    for key, hostname in ((one, left), (two, right)):
        uids[key] = admin.create(ENVOY_PROXY, named(*key, hostname))["metadata"]["uid"]
        wait_registered(admin, key)

    want(admin, one, right)
    want(admin, two, left)

    for key in (one, two):
        wait_registered(admin, key)
    assert (holder(admin, right), holder(admin, left)) == (uids[one], uids[two])


@pytest.mark.usefixtures("running_operator")
def test_a_hostname_that_is_given_up_is_free(admin: Kube, namespace: str, neighbour: str) -> None:
    """Changing or removing the hostname frees the old one for whoever waits for it."""
    old, new = f"old.{namespace}.example.com", f"new.{namespace}.example.com"
    first, second = Key(namespace, "first"), Key(neighbour, "second")
    proxy = admin.create(ENVOY_PROXY, named(*first, old))
    wait_registered(admin, first)
    other = admin.create(ENVOY_PROXY, named(*second, old))
    admin.wait_until(ENVOY_PROXY, second, is_refused("Registered", "HostnameTaken"))

    want(admin, first, new)
    wait_registered(admin, second)
    wait_registered(admin, first)
    assert (holder(admin, old), holder(admin, new)) == (other["metadata"]["uid"], proxy["metadata"]["uid"])

    admin.patch(ENVOY_PROXY, first, {"spec": {"registration": None}})
    wait_registered(admin, first)
    wait_until(lambda: holder(admin, new) is None, what="the hostname to be free")
    assert "hostname" not in record(admin, proxy)["spec"]


@pytest.mark.usefixtures("running_operator")
def test_a_new_life_waits_for_the_hostname_of_the_old_one_and_gets_it(admin: Kube, namespace: str) -> None:
    """Deleted and created again under one name at once: the claim ends up with the new UID, and only one is left."""
    hostname, key = f"{namespace}.example.com", Key(namespace, "web")
    admin.create(ENVOY_PROXY, named(*key, hostname))
    old = wait_registered(admin, key)

    admin.delete(ENVOY_PROXY, key)
    admin.wait_gone(ENVOY_PROXY, key, uid=old["metadata"]["uid"])
    new = admin.create(ENVOY_PROXY, named(*key, hostname))

    wait_registered(admin, key)
    assert holder(admin, hostname) == new["metadata"]["uid"]
    assert admin.find(PROXY_REGISTRATION, record_key(old)) is None


def test_a_claim_is_named_like_its_hostname_and_keeps_its_holder(admin: Kube, namespace: str) -> None:
    """The API server itself holds a claim's uniqueness: no second name for a hostname, no other holder."""
    claim = {
        "apiVersion": HOSTNAME_CLAIM.api_version,
        "kind": HOSTNAME_CLAIM.kind,
        "metadata": {"namespace": namespace, "name": "a.example.com"},
        "spec": {"hostname": "b.example.com", "proxy": {"namespace": namespace, "name": "web", "uid": "one"}},
    }
    with pytest.raises(Exception, match="one hostname has one claim"):
        admin.create(HOSTNAME_CLAIM, claim)
    claim["spec"]["hostname"] = "a.example.com"  # type: ignore[index]
    admin.create(HOSTNAME_CLAIM, claim)
    with pytest.raises(Exception, match="keeps its owner"):
        admin.patch(HOSTNAME_CLAIM, Key(namespace, "a.example.com"), {"spec": {"proxy": {"uid": "two"}}})


# --- the outside ---------------------------------------------------------------------------------------------------


def test_a_hostname_costs_two_more_writes_and_the_outside_one_call(
    admin: Kube, audit: AuditLog, namespace: str, operator: OperatorProcess, outside: Outside
) -> None:
    """Claim, entry, publication, confirmation; then silence outside: through noise, rounds and a restart."""
    hostname, key = f"{namespace}.example.com", Key(namespace, "web")
    operator.start(*FLAGS)
    mark = audit.mark()
    admin.create(ENVOY_PROXY, named(*key, hostname))
    proxy = wait_registered(admin, key)
    time.sleep(QUIET_S)

    mine = {(OPERATOR_NAMESPACE, hostname), tuple(record_key(proxy))}
    spent = [
        (each.verb, each.resource, each.subresource)
        for each in audit.entries(mark)
        if each.user == OPERATOR_USER and (each.namespace, each.name) in mine
    ]
    assert spent == [
        ("patch", "hostnameclaims", ""),
        ("patch", "proxyregistrations", ""),
        ("patch", "proxyregistrations", "status"),
    ]
    assert outside.calls(namespace) == [f"register {hostname}"]
    found = outside.get(hostname)
    assert found is not None
    assert (found["uid"], found["generation"], found["operator"]) == (proxy["metadata"]["uid"], 1, OPERATOR_ID)
    assert found["address"] == f"web-envoy.{namespace}.svc"

    mark = audit.mark()
    admin.patch(ENVOY_PROXY, key, {"metadata": {"labels": {"noise": "one"}}})
    operator.stop()
    operator.start(*FLAGS)
    rounds = operator.metric("operator_app_rounds_total")
    admin.patch(ENVOY_PROXY, key, {"metadata": {"labels": {"noise": "two"}}})
    wait_until(lambda: operator.metric("operator_app_rounds_total") > rounds, what="another round")
    time.sleep(QUIET_S)
    assert outside.calls(namespace) == [f"register {hostname}"], "what was confirmed is not asked again"
    written = [each for each in audit.writes(OPERATOR_USER, mark) if (each.namespace, each.name) in mine]
    assert written == []
    assert [each for each in audit.writes(OPERATOR_USER, mark) if each.namespace == namespace] == []


def test_a_change_of_hostname_leaves_no_old_record(
    admin: Kube, namespace: str, operator: OperatorProcess, outside: Outside
) -> None:
    """The new name is there before the old one goes, and the ledger names nothing that is gone."""
    old, new, key = f"old.{namespace}.example.com", f"new.{namespace}.example.com", Key(namespace, "web")
    operator.start(*FLAGS)
    admin.create(ENVOY_PROXY, named(*key, old))
    wait_registered(admin, key)

    admin.patch(ENVOY_PROXY, key, {"spec": {"registration": {"hostname": new, "ttl": 60}}})
    proxy = wait_registered(admin, key)

    assert [each for each in outside.records() if namespace in each] == [new]
    assert outside.records()[new]["ttl"] == 60
    assert outside.calls(namespace) == [f"register {old}", f"register {new}", f"deregister {old}"]
    wait_until(lambda: holder(admin, old) is None, what="the old claim to be gone")
    entry = record(admin, proxy)
    assert "retiring" not in entry["spec"]
    assert entry["status"]["confirmedGeneration"] == entry["metadata"]["generation"]


def test_a_change_of_registry_moves_the_record(
    admin: Kube, namespace: str, operator: OperatorProcess, outside: Outside
) -> None:
    """Named in the spec, a registry is used instead of the default; what the other one holds is taken back."""
    hostname, key = f"{namespace}.example.com", Key(namespace, "web")
    operator.start(*FLAGS)
    admin.create(ENVOY_PROXY, named(*key, hostname))
    proxy = wait_registered(admin, key)

    admin.patch(ENVOY_PROXY, key, {"spec": {"registration": {"registry": "in-cluster"}}})
    wait_registered(admin, key)
    assert outside.get(hostname) is None
    assert record(admin, proxy)["spec"]["registry"] == "in-cluster"
    assert holder(admin, hostname) == proxy["metadata"]["uid"]

    admin.patch(ENVOY_PROXY, key, {"spec": {"registration": {"registry": "elsewhere"}}})
    refused = admin.wait_until(ENVOY_PROXY, key, is_refused("Registered", "RegistryUnknown"))
    assert "files" in condition(refused, "Registered")["message"], "the sentence says what to write instead"
    assert condition(refused, "Stalled")["reason"] == "RegistryUnknown"
    assert record(admin, proxy)["spec"]["registry"] == "in-cluster", (
        "nothing is taken back for a name that is not known"
    )


@pytest.mark.parametrize(
    "behind",
    [
        Point("apply", "HostnameClaim"),
        Point("apply", "ProxyRegistration"),
        Point("apply", "ProxyRegistration", n=2),
        Point("delete", "HostnameClaim"),
        Point("apply", "ProxyRegistration", "status"),
    ],
    ids=str,
)
def test_a_crash_behind_any_write_of_a_change_of_hostname_leaves_one_record(
    admin: Kube, namespace: str, operator: OperatorProcess, outside: Outside, behind: Point, tmp_path: Path
) -> None:
    """New claim, entry, entry without the old name, old claim, confirmation: after each the restart completes it."""
    old, new, key = f"old.{namespace}.example.com", f"new.{namespace}.example.com", Key(namespace, "web")
    operator.start(*FLAGS)
    proxy = admin.create(ENVOY_PROXY, named(*key, old))
    wait_registered(admin, key)
    operator.stop()
    want(admin, key, new)
    plan = tmp_path / "plan.json"
    Plan((Fault("kill", FaultKind.KILL_BEHIND, behind, namespace),)).write(plan)
    module = ("tests.e2e.faults.operator", str(plan), str(tmp_path / "told.jsonl"), "run")
    operator.start(*FLAGS, module=module, wait=False)
    assert operator.wait_dead() == -9, operator.log_text()

    published = {each for each in outside.records() if namespace in each}
    spec = record(admin, proxy)["spec"]
    noted = {spec["hostname"], *(each["hostname"] for each in spec.get("retiring", ()))}
    assert published <= noted, "what stands outside is in the ledger, whenever the crash comes"
    assert {holder(admin, each) for each in noted} == {proxy["metadata"]["uid"]}, "and it is claimed"

    operator.start(*FLAGS)
    wait_registered(admin, key)
    assert [each for each in outside.records() if namespace in each] == [new]
    wait_until(lambda: holder(admin, old) is None, what="the old claim to be gone")
    assert "retiring" not in record(admin, proxy)["spec"]


def test_a_dead_registry_delays_nothing_but_itself(
    admin: Kube, namespace: str, operator: OperatorProcess, outside: Outside
) -> None:
    """While it is down, children are made and repaired at once and edits are served; then the record follows."""
    hostname, key = f"{namespace}.example.com", Key(namespace, "web")
    outside.fail("down")
    operator.start(*FLAGS, "--backoff-cap-s=60", "--backoff-base-s=30")
    admin.create(ENVOY_PROXY, named(*key, hostname))
    proxy = admin.wait_until(ENVOY_PROXY, key, is_refused("Registered", "RegistryError"))
    assert condition(proxy, "Reconciled")["status"] == "True"
    assert condition(proxy, "Stalled") == {}

    admin.patch(SERVICE, child_key(key), {"spec": {"selector": {"app": "mine"}}})
    wait_until(lambda: drift_of(admin, key) == {}, 5, "the repair, long before the registry is tried again")

    outside.fail(None)
    admin.patch(ENVOY_PROXY, key, {"spec": {"registration": {"ttl": 60}}})
    wait_registered(admin, key, 5)
    assert outside.records()[hostname]["ttl"] == 60


def test_a_registry_that_hangs_does_not_hold_its_tenants_only_lane(
    admin: Kube, namespace: str, operator: OperatorProcess, outside: Outside
) -> None:
    """Many removals wait for it, and what else the tenant declares waits for one timeout, not for one of each."""
    keys = [Key(namespace, f"web-{number}") for number in range(8)]
    operator.start(*FLAGS, "--in-flight-per-tenant=1")
    proxies = [admin.create(ENVOY_PROXY, named(*key, f"{key.name}.{namespace}.example.com")) for key in keys]
    for key in keys:
        wait_registered(admin, key)
    calls = len(outside.calls(namespace))

    outside.fail("hangs")
    for key in keys:
        admin.delete(ENVOY_PROXY, key)
    wait_until(lambda: len(outside.calls(namespace)) > calls, what="the first removal")
    begun = time.monotonic()
    admin.create(ENVOY_PROXY, named(namespace, "another", None))
    wait_reconciled(admin, Key(namespace, "another"))
    assert time.monotonic() - begun < 2 * TIMEOUT_S
    for key in keys:
        admin.wait_until(ENVOY_PROXY, key, is_refused("Registered", "DeregistrationFailed"))
    assert len(outside.calls(namespace)) - calls < len(keys)

    outside.fail(None)
    for proxy in proxies:
        wait_all_gone(admin, proxy)


def test_a_registry_that_asks_for_time_gets_it(
    admin: Kube, namespace: str, operator: OperatorProcess, outside: Outside
) -> None:
    """``Retry-After`` (3 s here) holds for calls to the registry, and for nothing else, not even a user's edit."""
    hostname, key = f"{namespace}.example.com", Key(namespace, "web")
    outside.fail("throttled")
    operator.start(*FLAGS)
    admin.create(ENVOY_PROXY, named(*key, hostname))
    admin.wait_until(ENVOY_PROXY, key, is_refused("Registered", "RegistryError"))
    outside.fail(None)
    begun = time.monotonic()
    admin.patch(ENVOY_PROXY, key, {"spec": {"replicas": 2}})
    wait_reconciled(admin, key, 2)
    assert outside.calls(namespace) == [f"register {hostname}"]

    wait_registered(admin, key)
    assert time.monotonic() - begun > 1
    assert outside.calls(namespace) == [f"register {hostname}"] * 2


def test_a_name_that_is_a_strangers_outside_is_left_alone(
    admin: Kube, namespace: str, operator: OperatorProcess, outside: Outside
) -> None:
    """The claim is ours and the name outside is not: not registered, not touched, and fine once it is free."""
    hostname, key = f"{namespace}.example.com", Key(namespace, "web")
    outside.put(hostname, stranger := {"address": "192.0.2.1"})
    operator.start(*FLAGS)
    admin.create(ENVOY_PROXY, named(*key, hostname))
    admin.wait_until(ENVOY_PROXY, key, is_refused("Registered", "NameConflict"))
    assert outside.get(hostname) == stranger

    outside.put(hostname, None)
    wait_registered(admin, key)


# --- drift of the outside ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_lost", [False, True], ids=["changed", "removed"])
def test_a_sweep_finds_and_repairs_a_record_that_was_changed_outside(
    admin: Kube, namespace: str, operator: OperatorProcess, outside: Outside, *, is_lost: bool
) -> None:
    """Nobody tells of an edit outside, so the sweep looks; an Event tells of the repair, and the ledger stays."""
    hostname, key = f"{namespace}.example.com", Key(namespace, "web")
    operator.start(f"--registry={NAME}", "--sweep-interval-s=1")
    admin.create(ENVOY_PROXY, named(*key, hostname))
    proxy = wait_registered(admin, key)
    good = outside.records()[hostname]
    before = record(admin, proxy)

    outside.put(hostname, None if is_lost else good | {"address": "192.0.2.66"})

    wait_until(lambda: outside.get(hostname) == good, 20, "the record to be repaired")
    assert record(admin, proxy) == before
    wait_until(lambda: "DriftRepaired" in events(admin, namespace), what="the Event")


def test_drift_that_cannot_be_repaired_is_told_and_remembered(
    admin: Kube, namespace: str, operator: OperatorProcess, outside: Outside
) -> None:
    """A record that became a stranger's: Registered turns False, stays so, and the stranger's record stays too."""
    hostname, key = f"{namespace}.example.com", Key(namespace, "web")
    operator.start(f"--registry={NAME}", "--sweep-interval-s=1")
    admin.create(ENVOY_PROXY, named(*key, hostname))
    proxy = wait_registered(admin, key)

    outside.put(hostname, stranger := {"address": "192.0.2.66"})

    admin.wait_until(ENVOY_PROXY, key, is_refused("Registered", "NameConflict"), 20)
    assert outside.get(hostname) == stranger
    assert record(admin, proxy)["status"]["confirmedGeneration"] == 0


def test_a_registry_that_is_down_at_a_sweep_is_no_news(
    admin: Kube, namespace: str, operator: OperatorProcess, outside: Outside
) -> None:
    """A look that fails changes no status: what was confirmed stands until something else is seen."""
    hostname, key = f"{namespace}.example.com", Key(namespace, "web")
    operator.start(f"--registry={NAME}", "--sweep-interval-s=1")
    admin.create(ENVOY_PROXY, named(*key, hostname))
    wait_registered(admin, key)
    time.sleep(QUIET_S)
    proxy = admin.get(ENVOY_PROXY, key)

    outside.fail("down")
    looks = outside.calls(namespace).count(f"observe {hostname}")
    wait_until(lambda: outside.calls(namespace).count(f"observe {hostname}") > looks + 1, 20, "two more looks")

    assert admin.get(ENVOY_PROXY, key)["status"] == proxy["status"]


def events(admin: Kube, namespace: str) -> set[str]:
    """Reasons of the Events in a namespace."""
    answer = admin.request("GET", f"/apis/events.k8s.io/v1/namespaces/{namespace}/events")
    return {each["reason"] for each in answer.json()["items"]}


# --- parting -------------------------------------------------------------------------------------------------------


def test_deletion_takes_everything_back_and_then_lets_go(
    admin: Kube, namespace: str, operator: OperatorProcess, outside: Outside
) -> None:
    """Proxy, entry, claim and outside record go; what was not registered costs the registry no call."""
    hostname, key, plain = f"{namespace}.example.com", Key(namespace, "web"), Key(namespace, "plain")
    operator.start(*FLAGS)
    admin.create(ENVOY_PROXY, named(*key, hostname))
    admin.create(ENVOY_PROXY, named(*plain, None))
    proxies = [wait_registered(admin, each) for each in (key, plain)]

    for each in (key, plain):
        admin.delete(ENVOY_PROXY, each)

    for proxy in proxies:
        wait_all_gone(admin, proxy)
    assert outside.get(hostname) is None
    wait_until(lambda: holder(admin, hostname) is None, what="the claim to be gone")
    assert outside.calls(namespace) == [f"register {hostname}", f"deregister {hostname}"]


def test_a_deletion_waits_for_a_dead_registry_and_says_so(
    admin: Kube, namespace: str, operator: OperatorProcess, outside: Outside
) -> None:
    """Condition and Event name the reason, nothing is forgotten; when the registry is back, everything goes."""
    hostname, key = f"{namespace}.example.com", Key(namespace, "web")
    operator.start(*FLAGS)
    admin.create(ENVOY_PROXY, named(*key, hostname))
    proxy = wait_registered(admin, key)
    outside.fail("down")

    admin.delete(ENVOY_PROXY, key)

    stuck = admin.wait_until(ENVOY_PROXY, key, is_refused("Registered", "DeregistrationFailed"))
    assert condition(stuck, "Ready")["reason"] == "DeregistrationFailed"
    assert condition(stuck, "Reconciled")["status"] == "True", "what was verified stands"
    assert stuck["status"]["observedGeneration"] == stuck["metadata"]["generation"]
    wait_until(lambda: "DeregistrationFailed" in events(admin, namespace), what="the Event")
    tries = len(outside.calls(namespace))
    wait_until(lambda: len(outside.calls(namespace)) > tries + 1, 20, "further tries")
    assert admin.get(ENVOY_PROXY, key)["metadata"]["resourceVersion"] == stuck["metadata"]["resourceVersion"]

    outside.fail(None)
    wait_all_gone(admin, proxy)
    assert outside.get(hostname) is None


@pytest.mark.timeout(240)
def test_an_abandoned_removal_lets_proxy_and_namespace_go_and_is_worked_off_later(
    admin: Kube, namespace: str, operator: OperatorProcess, outside: Outside
) -> None:
    """The ledger keeps the removal through a restart; with the registry back, name and claim are freed."""
    hostname, key = f"{namespace}.example.com", Key(namespace, "web")
    operator.start(*FLAGS, "--abandon-after-s=1")
    admin.create(ENVOY_PROXY, named(*key, hostname))
    proxy = wait_registered(admin, key)
    outside.fail("down")

    admin.delete(NAMESPACE, Key("", namespace))

    # The namespace controller takes its time when many namespaces go at once.
    admin.wait_gone(ENVOY_PROXY, key, timeout_s=90)
    admin.wait_gone(NAMESPACE, Key("", namespace), timeout_s=90)
    assert record(admin, proxy)["spec"]["state"] == "Abandoned"
    assert holder(admin, hostname) == proxy["metadata"]["uid"], "nobody else gets a name that still leads here"
    operator.stop()
    operator.start(*FLAGS)
    assert outside.get(hostname) is not None

    outside.fail(None)
    wait_until(lambda: admin.find(PROXY_REGISTRATION, record_key(proxy)) is None, 20, "the removal to be worked off")
    assert outside.get(hostname) is None
    wait_until(lambda: holder(admin, hostname) is None, what="the claim to be gone")
    assert operator.is_running


def in_files(outside: Outside) -> Registries:
    """The registry of files for rounds by hand."""
    return Registries({NAME: FileRegistry(outside, OPERATOR_ID)}, default=NAME)


async def settle(parts: Components, admin: Kube, key: Key, rounds: int = 4) -> None:
    """Rounds over what is stored, as if every watch had told."""
    for _ in range(rounds):
        deliver_everything(parts, admin, key)
        await parts.reconciler.reconcile(key)
    deliver_everything(parts, admin, key)


def deliver_everything(parts: Components, admin: Kube, key: Key) -> None:
    """Let the store hold what there is now of the proxy, its children, its records and claims."""
    live = admin.find(ENVOY_PROXY, key)
    if live is not None:
        parts.deliver(ENVOY_PROXY, live)
    for kind in (PROXY_REGISTRATION, HOSTNAME_CLAIM):
        mine = (each for each in admin.list(kind, OPERATOR_NAMESPACE) if each["spec"]["proxy"]["name"] == key.name)
        parts.deliver(kind, *(each for each in mine if each["spec"]["proxy"]["namespace"] == key.namespace))
    for kind in CHILD_KINDS:
        child = admin.find(kind, child_key(key))
        if child is not None:
            parts.deliver(kind, child)


@pytest.mark.anyio
async def test_a_new_life_is_served_while_the_old_ones_removal_is_still_abandoned(
    admin: Kube, namespace: str, operator_kubeconfig: Path, outside: Outside
) -> None:
    """Everything of the new proxy but the hostname; its round succeeds, and asks to come back for the rest."""
    hostname, key = f"{namespace}.example.com", Key(namespace, "web")
    later = [datetime.now(UTC)]
    async with components(
        operator_kubeconfig, registries=in_files(outside), abandon_after_s=60, now=lambda: later[0]
    ) as parts:
        old = admin.create(ENVOY_PROXY, named(*key, hostname))
        await settle(parts, admin, key)
        outside.fail("down")
        admin.delete(ENVOY_PROXY, key)
        await settle(parts, admin, key)
        assert FINALIZER in admin.get(ENVOY_PROXY, key)["metadata"]["finalizers"], "before its time it waits"
        later[0] += timedelta(seconds=61)
        await settle(parts, admin, key, 1)
        assert admin.find(ENVOY_PROXY, key) is None
        assert [each.reason for each in parts.occurrences] == ["DeregistrationFailed", "RemovalAbandoned"]

    async with components(operator_kubeconfig, registries=in_files(outside)) as parts:
        new = admin.create(ENVOY_PROXY, named(*key, hostname))
        admin.wait_gone(SERVICE, child_key(key), uid=None)
        await settle(parts, admin, key)
        verdict = await parts.reconciler.reconcile(key)
        assert verdict.failure is None, "nothing of the new life waits in a backoff"
        assert verdict.requeue_after_s is not None
        served = admin.get(ENVOY_PROXY, key)
        assert condition(served, "Reconciled")["status"] == "True"
        assert condition(served, "Registered")["reason"] == "PreviousIncarnation"
        assert outside.records()[hostname]["uid"] == old["metadata"]["uid"]

        outside.fail(None)
        await settle(parts, admin, key)
        assert condition(admin.get(ENVOY_PROXY, key), "Registered")["status"] == "True"
        assert outside.records()[hostname]["uid"] == new["metadata"]["uid"]
        assert admin.find(PROXY_REGISTRATION, record_key(old)) is None


def test_orphan_leaves_everything_and_nothing_of_it_is_taken_over(
    admin: Kube, namespace: str, operator: OperatorProcess, outside: Outside
) -> None:
    """Children run on unowned and unlabelled, record and claim stay; a proxy of that name meets strangers."""
    hostname, key = f"{namespace}.example.com", Key(namespace, "web")
    operator.start(*FLAGS)
    admin.create(ENVOY_PROXY, named(*key, hostname, deletionPolicy="Orphan"))
    old = wait_registered(admin, key)
    before = {kind: admin.get(kind, child_key(key)) for kind in CHILD_KINDS}

    admin.delete(ENVOY_PROXY, key)
    admin.wait_gone(ENVOY_PROXY, key, uid=old["metadata"]["uid"])
    time.sleep(QUIET_S)  # for the garbage collector

    for kind, was in before.items():
        child = admin.get(kind, child_key(key))
        assert child["metadata"]["uid"] == was["metadata"]["uid"]
        assert "ownerReferences" not in child["metadata"]
        assert not {LABEL_MANAGED_BY, LABEL_OWNER_UID} & set(child["metadata"]["labels"])
        assert {part: child.get(part) for part in ("spec", "data")} == {
            part: was.get(part) for part in ("spec", "data")
        }
    assert record(admin, old)["spec"]["state"] == "Orphaned"
    assert outside.records()[hostname]["uid"] == old["metadata"]["uid"]
    assert holder(admin, hostname) == old["metadata"]["uid"]

    new = admin.create(ENVOY_PROXY, named(*key, hostname))
    refused = admin.wait_until(ENVOY_PROXY, key, is_refused("Reconciled", "NameConflict"))
    for kind in CHILD_KINDS:
        admin.delete(kind, child_key(key))
    refused = admin.wait_until(ENVOY_PROXY, key, is_refused("Registered", "HostnameOrphaned"))
    assert record_key(old).name in condition(refused, "Registered")["message"]
    admin.delete(PROXY_REGISTRATION, record_key(old))
    outside.put(hostname, None)
    wait_registered(admin, key)
    assert outside.records()[hostname]["uid"] == new["metadata"]["uid"]


def test_what_never_came_to_be_needs_no_removal(
    admin: Kube, namespace: str, operator: OperatorProcess, outside: Outside
) -> None:
    """A proxy whose name was taken all its life goes without a call to a registry that is down anyway."""
    hostname, first, second = f"{namespace}.example.com", Key(namespace, "first"), Key(namespace, "second")
    operator.start(*FLAGS)
    admin.create(ENVOY_PROXY, named(*first, hostname))
    wait_registered(admin, first)
    admin.create(ENVOY_PROXY, named(*second, hostname))
    refused = admin.wait_until(ENVOY_PROXY, second, is_refused("Registered", "HostnameTaken"))
    outside.fail("down")
    calls = outside.calls(namespace)

    admin.delete(ENVOY_PROXY, second)

    wait_all_gone(admin, refused)
    assert outside.calls(namespace) == calls
    outside.fail(None)


@pytest.mark.anyio
async def test_a_stale_entry_never_forgets_a_name(
    admin: Kube, namespace: str, operator_kubeconfig: Path, outside: Outside
) -> None:
    """A round that knows an older entry than there is writes nothing over it: the names in it are all that is known."""
    old, new, key = f"old.{namespace}.example.com", f"new.{namespace}.example.com", Key(namespace, "web")
    async with components(operator_kubeconfig, registries=in_files(outside)) as parts:
        proxy = admin.create(ENVOY_PROXY, named(*key, old))
        await settle(parts, admin, key)
        stale = record(admin, proxy)
        outside.fail("down")
        want(admin, key, new)
        await settle(parts, admin, key)
        assert record(admin, proxy)["spec"]["retiring"] == [{"registry": NAME, "hostname": old}]

    newest = f"newest.{namespace}.example.com"
    edited = want(admin, key, newest)
    async with components(operator_kubeconfig, registries=in_files(outside)) as parts:
        parts.deliver(PROXY_REGISTRATION, stale)
        parts.deliver(ENVOY_PROXY, edited)
        for kind in CHILD_KINDS:
            parts.deliver(kind, admin.get(kind, child_key(key)))
        verdict = await parts.reconciler.reconcile(key)
        assert verdict.failure is not None
        assert record(admin, proxy)["spec"]["hostname"] == new, "it knew nothing of this name, so it did not replace it"

        outside.fail(None)
        await settle(parts, admin, key)
        assert [each for each in outside.records() if namespace in each] == [newest]
        assert "retiring" not in record(admin, proxy)["spec"]


@pytest.mark.anyio
async def test_the_outside_is_never_called_before_the_ledger_says_so(
    admin: Kube, namespace: str, operator_kubeconfig: Path, outside: Outside
) -> None:
    """With every request about the entry refused, no name is published, whatever the round does else."""
    hostname, key = f"{namespace}.example.com", Key(namespace, "web")

    async def fail(request: httpx2.Request) -> None:
        if "/proxyregistrations/" in request.url.path:
            raise httpx2.ConnectError("cut")

    async with components(operator_kubeconfig, registries=in_files(outside), before=fail) as parts:
        parts.deliver(ENVOY_PROXY, admin.create(ENVOY_PROXY, named(*key, hostname)))
        verdict = await parts.reconciler.reconcile(key)
        assert verdict.failure is not None
        assert outside.calls(namespace) == []
    with suppress(Exception):
        admin.delete(HOSTNAME_CLAIM, Key(OPERATOR_NAMESPACE, hostname))
