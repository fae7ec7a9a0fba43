"""Registration on a real API server: claims, the ledger, an outside registry with faults, and every way of removal."""

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
from operator_app.registration.identity import Installation
from operator_app.registration.registrar import Registries
from tests.e2e.components import Components, components
from tests.e2e.controlplane import AuditLog
from tests.e2e.faults.plan import Fault, FaultKind, Plan, Point
from tests.e2e.kube import Kube, wait_until
from tests.e2e.operator_process import OPERATOR_NAMESPACE, OperatorProcess
from tests.e2e.outside import CHOSEN, FLAGS, NAME, OPERATOR_ID, FileRegistry, Outside
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


@pytest.fixture
def neighbour(admin: Kube, namespace: str) -> Iterator[str]:
    """The namespace of another tenant."""
    name = f"{namespace[:50]}-next"
    admin.create_namespace(name)
    yield name
    leave_nothing(admin, name)


def named(namespace: str, name: str, hostname: str | None, **spec: Any) -> Object:
    """A proxy that declares a hostname."""
    registration = {"registration": {"hostname": hostname}} if hostname else {}
    return a_proxy(namespace, name, **registration, **spec)


def set_hostname(admin: Kube, key: Key, hostname: str) -> Object:
    """Edit the hostname that a proxy declares."""
    return admin.patch(ENVOY_PROXY, key, {"spec": {"registration": {"hostname": hostname}}})


def wait_registered(admin: Kube, key: Key) -> Object:
    """Wait until the record of a proxy is confirmed for its generation; the object."""
    return admin.wait_until(ENVOY_PROXY, key, holds("Registered"))


def owner_uid(admin: Kube, hostname: str) -> str | None:
    """The UID of the proxy that owns the claim on a hostname."""
    claim = admin.find(HOSTNAME_CLAIM, Key("", hostname))
    return None if claim is None else str(claim["spec"]["proxy"]["uid"])


def record(admin: Kube, proxy: Object) -> Object:
    """The ledger entry of a proxy."""
    return admin.get(PROXY_REGISTRATION, record_key(proxy))


# --- claims --------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("running_operator")
def test_the_second_proxy_gets_a_hostname_once_the_first_is_deleted(
    admin: Kube, namespace: str, neighbour: str
) -> None:
    """``HostnameTaken`` does not reveal the owner; everything else of the second proxy is reconciled meanwhile."""
    hostname = f"{namespace}.example.com"
    first, second = Key(namespace, "first"), Key(neighbour, "second")
    one = admin.create(ENVOY_PROXY, named(*first, hostname))
    wait_registered(admin, first)
    two = admin.create(ENVOY_PROXY, named(*second, hostname))

    refused = admin.wait_until(ENVOY_PROXY, second, is_refused("Registered", "HostnameTaken"))
    message = condition(refused, "Registered")["message"]
    assert hostname in message
    without_hostname = message.replace(hostname, "")
    assert not any(secret in without_hostname for secret in (one["metadata"]["uid"], "first", namespace))
    assert condition(refused, "Stalled")["reason"] == "HostnameTaken"
    assert condition(refused, "Reconciled")["status"] == "True"
    assert "hostname" not in record(admin, two)["spec"], "an entry never lists a hostname of another owner"
    assert owner_uid(admin, hostname) == one["metadata"]["uid"]

    admin.delete(ENVOY_PROXY, first)

    wait_registered(admin, second)
    assert owner_uid(admin, hostname) == two["metadata"]["uid"]
    assert record(admin, two)["spec"]["hostname"] == hostname
    assert condition(admin.get(ENVOY_PROXY, second), "Stalled") == {}


@pytest.mark.usefixtures("running_operator")
def test_two_proxies_can_swap_their_hostnames(admin: Kube, namespace: str) -> None:
    """A claim on the old hostname is released even while the new one is still taken, so there is no deadlock."""
    left, right = f"left.{namespace}.example.com", f"right.{namespace}.example.com"
    one, two = Key(namespace, "one"), Key(namespace, "two")
    uids = {}
    for key, hostname in ((one, left), (two, right)):
        uids[key] = admin.create(ENVOY_PROXY, named(*key, hostname))["metadata"]["uid"]
        wait_registered(admin, key)

    set_hostname(admin, one, right)
    set_hostname(admin, two, left)

    for key in (one, two):
        wait_registered(admin, key)
    assert (owner_uid(admin, right), owner_uid(admin, left)) == (uids[one], uids[two])


@pytest.mark.usefixtures("running_operator")
def test_a_hostname_that_is_no_longer_declared_is_released(admin: Kube, namespace: str, neighbour: str) -> None:
    """Changing or removing the hostname releases the old one for a proxy that waits for it."""
    old, new = f"old.{namespace}.example.com", f"new.{namespace}.example.com"
    first, second = Key(namespace, "first"), Key(neighbour, "second")
    proxy = admin.create(ENVOY_PROXY, named(*first, old))
    wait_registered(admin, first)
    other = admin.create(ENVOY_PROXY, named(*second, old))
    admin.wait_until(ENVOY_PROXY, second, is_refused("Registered", "HostnameTaken"))

    set_hostname(admin, first, new)
    wait_registered(admin, second)
    wait_registered(admin, first)
    assert (owner_uid(admin, old), owner_uid(admin, new)) == (other["metadata"]["uid"], proxy["metadata"]["uid"])

    admin.patch(ENVOY_PROXY, first, {"spec": {"registration": None}})
    wait_registered(admin, first)
    wait_until(lambda: owner_uid(admin, new) is None, what="the hostname to be free")
    assert "hostname" not in record(admin, proxy)["spec"]


@pytest.mark.usefixtures("running_operator")
def test_a_recreated_proxy_gets_the_hostname_of_its_previous_incarnation(admin: Kube, namespace: str) -> None:
    """Deleted and created again under one name at once: the claim gets the new UID, and the old entry is deleted."""
    hostname, key = f"{namespace}.example.com", Key(namespace, "web")
    admin.create(ENVOY_PROXY, named(*key, hostname))
    old = wait_registered(admin, key)

    admin.delete(ENVOY_PROXY, key)
    admin.wait_gone(ENVOY_PROXY, key, uid=old["metadata"]["uid"])
    new = admin.create(ENVOY_PROXY, named(*key, hostname))

    wait_registered(admin, key)
    assert owner_uid(admin, hostname) == new["metadata"]["uid"]
    assert admin.find(PROXY_REGISTRATION, record_key(old)) is None


def test_a_claim_is_named_like_its_hostname_and_keeps_its_owner(admin: Kube, namespace: str) -> None:
    """The API server itself ensures it: another name than the hostname is refused, and so is another owner.

    Only a claim that was given back may become another proxy's.
    """
    name = f"a.{namespace}.example.com"
    claim = {
        "apiVersion": HOSTNAME_CLAIM.api_version,
        "kind": HOSTNAME_CLAIM.kind,
        "metadata": {"name": name},
        "spec": {"hostname": "b.example.com", "proxy": {"namespace": namespace, "name": "web", "uid": "one"}},
    }
    with pytest.raises(Exception, match="one hostname has one claim"):
        admin.create(HOSTNAME_CLAIM, claim)
    claim["spec"]["hostname"] = name  # type: ignore[index]
    admin.create(HOSTNAME_CLAIM, claim)
    taken = {"spec": {"proxy": {"uid": "two"}, "releasedAt": None}}
    with pytest.raises(Exception, match="keeps its proxy until that has given it back"):
        admin.patch(HOSTNAME_CLAIM, Key("", name), taken)
    admin.patch(HOSTNAME_CLAIM, Key("", name), {"spec": {"releasedAt": "2026-07-01T12:00:00Z"}})
    assert admin.patch(HOSTNAME_CLAIM, Key("", name), taken)["spec"]["proxy"]["uid"] == "two"


# --- outside registries --------------------------------------------------------------------------------------------


def test_a_hostname_costs_two_more_writes_and_one_call_of_the_registry(
    admin: Kube, audit: AuditLog, namespace: str, operator: OperatorProcess, outside: Outside
) -> None:
    """Claim, entry, publication, confirmation; then no further call, despite other edits, reconciles and a restart."""
    hostname, key = f"{namespace}.example.com", Key(namespace, "web")
    operator.start(*FLAGS)
    mark = audit.mark()
    admin.create(ENVOY_PROXY, named(*key, hostname))
    proxy = wait_registered(admin, key)
    time.sleep(QUIET_S)

    mine = {("", hostname), tuple(record_key(proxy))}
    writes = [
        (each.verb, each.resource, each.subresource)
        for each in audit.entries(mark)
        if each.user == OPERATOR_USER and (each.namespace, each.name) in mine
    ]
    assert writes == [
        ("patch", "hostnameclaims", ""),
        ("patch", "proxyregistrations", ""),
        ("patch", "proxyregistrations", "status"),
    ]
    assert outside.calls(namespace) == [f"register {hostname}"]
    found = outside.get(hostname)
    assert found is not None
    ours = Installation.of(admin.get(NAMESPACE, Key("", "kube-system"))["metadata"]["uid"], OPERATOR_ID)
    assert (found["uid"], found["generation"], found["operator"]) == (proxy["metadata"]["uid"], 1, str(ours))
    assert found["address"] == f"web-envoy.{namespace}.svc"

    mark = audit.mark()
    admin.patch(ENVOY_PROXY, key, {"metadata": {"labels": {"noise": "one"}}})
    operator.stop()
    operator.start(*FLAGS)
    reconciles = operator.metric("operator_app_rounds_total")
    admin.patch(ENVOY_PROXY, key, {"metadata": {"labels": {"noise": "two"}}})
    wait_until(lambda: operator.metric("operator_app_rounds_total") > reconciles, what="another reconcile")
    time.sleep(QUIET_S)
    assert outside.calls(namespace) == [f"register {hostname}"], "a confirmed record is not registered again"
    written = [each for each in audit.writes(OPERATOR_USER, mark) if (each.namespace, each.name) in mine]
    assert written == []
    assert [each for each in audit.writes(OPERATOR_USER, mark) if each.namespace == namespace] == []


def test_a_change_of_hostname_leaves_no_old_record(
    admin: Kube, namespace: str, operator: OperatorProcess, outside: Outside
) -> None:
    """The new record is written before the old one is removed, and the entry lists no removed name."""
    old, new, key = f"old.{namespace}.example.com", f"new.{namespace}.example.com", Key(namespace, "web")
    operator.start(*FLAGS)
    admin.create(ENVOY_PROXY, named(*key, old))
    wait_registered(admin, key)

    admin.patch(ENVOY_PROXY, key, {"spec": {"registration": {"hostname": new, "ttl": 60}}})
    proxy = wait_registered(admin, key)

    assert [each for each in outside.records() if namespace in each] == [new]
    assert outside.records()[new]["ttl"] == 60
    assert outside.calls(namespace) == [f"register {old}", f"register {new}", f"deregister {old}"]
    wait_until(lambda: owner_uid(admin, old) is None, what="the old claim to be gone")
    entry = record(admin, proxy)
    assert "retiring" not in entry["spec"]
    assert entry["status"]["confirmedGeneration"] == entry["metadata"]["generation"]


def test_a_change_of_registry_moves_the_record(
    admin: Kube, namespace: str, operator: OperatorProcess, outside: Outside
) -> None:
    """A registry named in the spec is used instead of the default; the record in the other one is removed."""
    hostname, key = f"{namespace}.example.com", Key(namespace, "web")
    operator.start(*FLAGS)
    admin.create(ENVOY_PROXY, named(*key, hostname))
    proxy = wait_registered(admin, key)

    admin.patch(ENVOY_PROXY, key, {"spec": {"registration": {"registry": "in-cluster"}}})
    wait_registered(admin, key)
    assert outside.get(hostname) is None
    assert record(admin, proxy)["spec"]["registry"] == "in-cluster"
    assert owner_uid(admin, hostname) == proxy["metadata"]["uid"]

    admin.patch(ENVOY_PROXY, key, {"spec": {"registration": {"registry": "elsewhere"}}})
    refused = admin.wait_until(ENVOY_PROXY, key, is_refused("Registered", "RegistryUnknown"))
    assert "files" in condition(refused, "Registered")["message"], "the message says what to write instead"
    assert condition(refused, "Stalled")["reason"] == "RegistryUnknown"
    assert record(admin, proxy)["spec"]["registry"] == "in-cluster", (
        "no record is removed because of an unknown registry"
    )


@pytest.mark.parametrize(
    "after",
    [
        Point("apply", "HostnameClaim"),
        Point("apply", "ProxyRegistration"),
        Point("apply", "ProxyRegistration", n=2),
        Point("delete", "HostnameClaim"),
        Point("apply", "ProxyRegistration", "status"),
    ],
    ids=str,
)
def test_a_crash_after_any_write_of_a_change_of_hostname_leaves_one_record(
    admin: Kube, namespace: str, operator: OperatorProcess, outside: Outside, after: Point, tmp_path: Path
) -> None:
    """New claim, entry, entry without the old name, old claim, confirmation: the restart completes the change."""
    old, new, key = f"old.{namespace}.example.com", f"new.{namespace}.example.com", Key(namespace, "web")
    operator.start(*FLAGS)
    proxy = admin.create(ENVOY_PROXY, named(*key, old))
    wait_registered(admin, key)
    operator.stop()
    set_hostname(admin, key, new)
    plan = tmp_path / "plan.json"
    Plan((Fault("kill", FaultKind.KILL_BEHIND, after, namespace),)).write(plan)
    module = ("tests.e2e.faults.operator", str(plan), str(tmp_path / "observed.jsonl"), "run")
    operator.start(*FLAGS, module=module, wait=False)
    assert operator.wait_dead() == -9, operator.log_text()

    published = {each for each in outside.records() if namespace in each}
    spec = record(admin, proxy)["spec"]
    listed = {spec["hostname"], *(each["hostname"] for each in spec.get("retiring", ()))}
    assert published <= listed, "every published name is in the ledger, whenever the crash comes"
    assert {owner_uid(admin, each) for each in listed} == {proxy["metadata"]["uid"]}, "and it is claimed"

    operator.start(*FLAGS)
    wait_registered(admin, key)
    assert [each for each in outside.records() if namespace in each] == [new]
    wait_until(lambda: owner_uid(admin, old) is None, what="the old claim to be gone")
    assert "retiring" not in record(admin, proxy)["spec"]


def test_a_registry_that_is_down_delays_only_registration(
    admin: Kube, namespace: str, operator: OperatorProcess, outside: Outside
) -> None:
    """Meanwhile children are created and repaired at once, and edits are reconciled; the record follows later."""
    hostname, key = f"{namespace}.example.com", Key(namespace, "web")
    outside.fail("down")
    operator.start(*FLAGS, "--backoff-cap-s=600", "--backoff-base-s=600")
    admin.create(ENVOY_PROXY, named(*key, hostname))
    proxy = admin.wait_until(ENVOY_PROXY, key, is_refused("Registered", "RegistryError"))
    assert condition(proxy, "Reconciled")["status"] == "True"
    assert condition(proxy, "Stalled") == {}

    admin.patch(SERVICE, child_key(key), {"spec": {"selector": {"app": "mine"}}})
    wait_until(lambda: drift_of(admin, key) == {}, what="the repair, long before the registry is tried again")

    outside.fail(None)
    admin.patch(ENVOY_PROXY, key, {"spec": {"registration": {"ttl": 60}}})
    wait_registered(admin, key)
    assert outside.records()[hostname]["ttl"] == 60


def test_a_registry_that_hangs_does_not_block_the_only_worker_of_a_tenant(
    admin: Kube, namespace: str, operator: OperatorProcess, outside: Outside
) -> None:
    """While many removals wait for it, another proxy of the tenant does not wait for each of them."""
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
    admin.create(ENVOY_PROXY, named(namespace, "another", None))
    wait_reconciled(admin, Key(namespace, "another"))
    # The call under way, and those that probe whether the registry is back, of which a busy machine sees several.
    # Counted, since time says how busy the machine is: without a circuit breaker each removal would come first.
    assert len(outside.calls(namespace)) - calls < len(keys)
    for key in keys:
        admin.wait_until(ENVOY_PROXY, key, is_refused("Registered", "DeregistrationFailed"))
    assert len(outside.calls(namespace)) - calls < len(keys)

    outside.fail(None)
    for proxy in proxies:
        wait_all_gone(admin, proxy)


def test_retry_after_of_a_registry_delays_only_its_calls(
    admin: Kube, namespace: str, operator: OperatorProcess, outside: Outside
) -> None:
    """``Retry-After`` (3 s here) applies to calls of the registry and to nothing else, such as a user's edit."""
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


def test_a_foreign_record_is_never_written(
    admin: Kube, namespace: str, operator: OperatorProcess, outside: Outside
) -> None:
    """The claim is ours and the record is not: ``NameConflict``, and registered once the name is free."""
    hostname, key = f"{namespace}.example.com", Key(namespace, "web")
    outside.put(hostname, foreign := {"address": "192.0.2.1"})
    operator.start(*FLAGS)
    admin.create(ENVOY_PROXY, named(*key, hostname))
    admin.wait_until(ENVOY_PROXY, key, is_refused("Registered", "NameConflict"))
    assert outside.get(hostname) == foreign

    outside.put(hostname, None)
    wait_registered(admin, key)


# --- drift in outside registries -----------------------------------------------------------------------------------


@pytest.mark.parametrize("is_lost", [False, True], ids=["changed", "removed"])
def test_a_resync_repairs_a_record_that_was_changed_in_the_registry(
    admin: Kube, namespace: str, operator: OperatorProcess, outside: Outside, *, is_lost: bool
) -> None:
    """Such edits have no watch events, so the resync reads; the repair has an Event, the entry is not written."""
    hostname, key = f"{namespace}.example.com", Key(namespace, "web")
    operator.start(*CHOSEN, "--sweep-interval-s=1")
    admin.create(ENVOY_PROXY, named(*key, hostname))
    proxy = wait_registered(admin, key)
    good = outside.records()[hostname]
    before = record(admin, proxy)

    outside.put(hostname, None if is_lost else good | {"address": "192.0.2.66"})

    wait_until(lambda: outside.get(hostname) == good, what="the record to be repaired")
    assert record(admin, proxy) == before
    wait_until(lambda: "DriftRepaired" in events(admin, namespace), what="the Event")


def test_drift_that_cannot_be_repaired_is_reported_and_stored(
    admin: Kube, namespace: str, operator: OperatorProcess, outside: Outside
) -> None:
    """A record that became foreign: Registered turns False, the confirmation is cleared, the record is not written."""
    hostname, key = f"{namespace}.example.com", Key(namespace, "web")
    operator.start(*CHOSEN, "--sweep-interval-s=1")
    admin.create(ENVOY_PROXY, named(*key, hostname))
    proxy = wait_registered(admin, key)

    outside.put(hostname, foreign := {"address": "192.0.2.66"})

    admin.wait_until(ENVOY_PROXY, key, is_refused("Registered", "NameConflict"))
    assert outside.get(hostname) == foreign
    assert record(admin, proxy)["status"]["confirmedGeneration"] == 0


def test_a_registry_that_is_down_at_a_resync_changes_no_status(
    admin: Kube, namespace: str, operator: OperatorProcess, outside: Outside
) -> None:
    """A read that fails is no drift: a confirmed record stays confirmed until a read shows something else."""
    hostname, key = f"{namespace}.example.com", Key(namespace, "web")
    operator.start(*CHOSEN, "--sweep-interval-s=1")
    admin.create(ENVOY_PROXY, named(*key, hostname))
    wait_registered(admin, key)
    time.sleep(QUIET_S)
    proxy = admin.get(ENVOY_PROXY, key)

    outside.fail("down")
    reads = outside.calls(namespace).count(f"observe {hostname}")
    wait_until(lambda: outside.calls(namespace).count(f"observe {hostname}") > reads + 1, what="two more reads")

    assert admin.get(ENVOY_PROXY, key)["status"] == proxy["status"]


def events(admin: Kube, namespace: str) -> set[str]:
    """Reasons of the Events in a namespace."""
    answer = admin.request("GET", f"/apis/events.k8s.io/v1/namespaces/{namespace}/events")
    return {each["reason"] for each in answer.json()["items"]}


# --- removal -------------------------------------------------------------------------------------------------------


def test_deletion_removes_everything_before_the_finalizer(
    admin: Kube, namespace: str, operator: OperatorProcess, outside: Outside
) -> None:
    """Proxy, entry, claim and record are removed; for a proxy without a hostname the registry is not called."""
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
    wait_until(lambda: owner_uid(admin, hostname) is None, what="the claim to be gone")
    assert outside.calls(namespace) == [f"register {hostname}", f"deregister {hostname}"]


def test_a_deletion_waits_for_a_registry_that_is_down_and_reports_it(
    admin: Kube, namespace: str, operator: OperatorProcess, outside: Outside
) -> None:
    """Condition and Event have the reason, the entry stays; when the registry is back, everything is removed."""
    hostname, key = f"{namespace}.example.com", Key(namespace, "web")
    operator.start(*FLAGS)
    admin.create(ENVOY_PROXY, named(*key, hostname))
    proxy = wait_registered(admin, key)
    outside.fail("down")

    admin.delete(ENVOY_PROXY, key)

    stuck = admin.wait_until(ENVOY_PROXY, key, is_refused("Registered", "DeregistrationFailed"))
    assert condition(stuck, "Ready")["reason"] == "DeregistrationFailed"
    assert condition(stuck, "Reconciled")["status"] == "True", "the verified state is kept"
    assert stuck["status"]["observedGeneration"] == stuck["metadata"]["generation"]
    wait_until(lambda: "DeregistrationFailed" in events(admin, namespace), what="the Event")
    tries = len(outside.calls(namespace))
    wait_until(lambda: len(outside.calls(namespace)) > tries + 1, what="further tries")
    assert admin.get(ENVOY_PROXY, key)["metadata"]["resourceVersion"] == stuck["metadata"]["resourceVersion"]

    outside.fail(None)
    wait_all_gone(admin, proxy)
    assert outside.get(hostname) is None


@pytest.mark.timeout(900)
def test_an_abandoned_removal_does_not_block_the_namespace_and_is_completed_later(
    admin: Kube, namespace: str, operator: OperatorProcess, outside: Outside
) -> None:
    """The entry keeps the removal through a restart; when the registry is back, record and claim are removed."""
    hostname, key = f"{namespace}.example.com", Key(namespace, "web")
    operator.start(*FLAGS, "--abandon-after-s=1")
    admin.create(ENVOY_PROXY, named(*key, hostname))
    proxy = wait_registered(admin, key)
    outside.fail("down")

    admin.delete(NAMESPACE, Key("", namespace))

    # The namespace controller is slow when many namespaces are deleted at once.
    admin.wait_gone(ENVOY_PROXY, key, timeout_s=90)
    admin.wait_gone(NAMESPACE, Key("", namespace), timeout_s=90)
    assert record(admin, proxy)["spec"]["state"] == "Abandoned"
    assert owner_uid(admin, hostname) == proxy["metadata"]["uid"], "nobody else gets a hostname that still leads here"
    operator.stop()
    operator.start(*FLAGS)
    assert outside.get(hostname) is not None

    outside.fail(None)
    wait_until(lambda: admin.find(PROXY_REGISTRATION, record_key(proxy)) is None, what="the removal to be completed")
    assert outside.get(hostname) is None
    wait_until(lambda: owner_uid(admin, hostname) is None, what="the claim to be gone")
    assert operator.is_running


def in_files(outside: Outside) -> Registries:
    """The registry of files for reconciles that a test calls itself."""
    installation = Installation.of("a cluster", OPERATOR_ID)
    return Registries({NAME: FileRegistry(outside, installation)}, NAME, installation)


async def reconcile_repeatedly(parts: Components, admin: Kube, key: Key, times: int = 4) -> None:
    """Reconcile a proxy several times, each time with a store that has all of its objects."""
    for _ in range(times):
        fill_store(parts, admin, key)
        await parts.reconciler.reconcile(key)
    fill_store(parts, admin, key)


def fill_store(parts: Components, admin: Kube, key: Key) -> None:
    """Put the present proxy, its children, entries and claims into the store."""
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
async def test_a_recreated_proxy_is_reconciled_while_an_abandoned_removal_is_pending(
    admin: Kube, namespace: str, operator_kubeconfig: Path, outside: Outside
) -> None:
    """Everything but its hostname is served; the reconcile succeeds and requests a requeue for the hostname."""
    hostname, key = f"{namespace}.example.com", Key(namespace, "web")
    now = [datetime.now(UTC)]
    async with components(
        operator_kubeconfig, registries=in_files(outside), abandon_after_s=60, now=lambda: now[0]
    ) as parts:
        old = admin.create(ENVOY_PROXY, named(*key, hostname))
        await reconcile_repeatedly(parts, admin, key)
        outside.fail("down")
        admin.delete(ENVOY_PROXY, key)
        await reconcile_repeatedly(parts, admin, key)
        assert FINALIZER in admin.get(ENVOY_PROXY, key)["metadata"]["finalizers"], "it waits before --abandon-after-s"
        now[0] = datetime.now(UTC) + timedelta(seconds=61)
        await reconcile_repeatedly(parts, admin, key, 1)
        assert admin.find(ENVOY_PROXY, key) is None
        assert [each.reason for each in parts.occurrences] == ["DeregistrationFailed", "RemovalAbandoned"]

    async with components(operator_kubeconfig, registries=in_files(outside)) as parts:
        new = admin.create(ENVOY_PROXY, named(*key, hostname))
        admin.wait_gone(SERVICE, child_key(key), uid=None)
        await reconcile_repeatedly(parts, admin, key)
        result = await parts.reconciler.reconcile(key)
        assert result.failure is None, "the new proxy is not in a backoff"
        assert result.requeue_after_s is not None
        served = admin.get(ENVOY_PROXY, key)
        assert condition(served, "Reconciled")["status"] == "True"
        assert condition(served, "Registered")["reason"] == "PreviousIncarnation"
        assert outside.records()[hostname]["uid"] == old["metadata"]["uid"]

        outside.fail(None)
        await reconcile_repeatedly(parts, admin, key)
        assert condition(admin.get(ENVOY_PROXY, key), "Registered")["status"] == "True"
        assert outside.records()[hostname]["uid"] == new["metadata"]["uid"]
        assert admin.find(PROXY_REGISTRATION, record_key(old)) is None


def test_orphaned_objects_stay_and_are_not_adopted(
    admin: Kube, namespace: str, operator: OperatorProcess, outside: Outside
) -> None:
    """Children stay without owner and labels, entry, record and claim stay; a new proxy of that name adopts none."""
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
    assert owner_uid(admin, hostname) == old["metadata"]["uid"]

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


def test_a_proxy_that_was_never_registered_needs_no_removal(
    admin: Kube, namespace: str, operator: OperatorProcess, outside: Outside
) -> None:
    """A proxy whose hostname was always taken is deleted without a call of the registry, even one that is down."""
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
async def test_a_stale_store_never_removes_a_name_from_an_entry(
    admin: Kube, namespace: str, operator_kubeconfig: Path, outside: Outside
) -> None:
    """A reconcile with an older version of the entry does not overwrite it: no listed name is lost."""
    old, new, key = f"old.{namespace}.example.com", f"new.{namespace}.example.com", Key(namespace, "web")
    async with components(operator_kubeconfig, registries=in_files(outside)) as parts:
        proxy = admin.create(ENVOY_PROXY, named(*key, old))
        await reconcile_repeatedly(parts, admin, key)
        stale = record(admin, proxy)
        outside.fail("down")
        set_hostname(admin, key, new)
        await reconcile_repeatedly(parts, admin, key)
        assert record(admin, proxy)["spec"]["retiring"] == [{"registry": NAME, "hostname": old}]

    newest = f"newest.{namespace}.example.com"
    edited = set_hostname(admin, key, newest)
    async with components(operator_kubeconfig, registries=in_files(outside)) as parts:
        parts.deliver(PROXY_REGISTRATION, stale)
        parts.deliver(ENVOY_PROXY, edited)
        for kind in CHILD_KINDS:
            parts.deliver(kind, admin.get(kind, child_key(key)))
        result = await parts.reconciler.reconcile(key)
        assert result.failure is not None
        assert record(admin, proxy)["spec"]["hostname"] == new, (
            "the store lacked this name, so the entry was not replaced"
        )

        outside.fail(None)
        await reconcile_repeatedly(parts, admin, key)
        assert [each for each in outside.records() if namespace in each] == [newest]
        assert "retiring" not in record(admin, proxy)["spec"]


@pytest.mark.anyio
async def test_the_registry_is_never_called_before_the_entry_is_written(
    admin: Kube, namespace: str, operator_kubeconfig: Path, outside: Outside
) -> None:
    """While every request about the entry fails, no hostname is published."""
    hostname, key = f"{namespace}.example.com", Key(namespace, "web")

    async def fail(request: httpx2.Request) -> None:
        if "/proxyregistrations/" in request.url.path:
            raise httpx2.ConnectError("cut")

    async with components(operator_kubeconfig, registries=in_files(outside), before=fail) as parts:
        parts.deliver(ENVOY_PROXY, admin.create(ENVOY_PROXY, named(*key, hostname)))
        result = await parts.reconciler.reconcile(key)
        assert result.failure is not None
        assert outside.calls(namespace) == []
    with suppress(Exception):
        admin.delete(HOSTNAME_CLAIM, Key("", hostname))
