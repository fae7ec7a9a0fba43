"""Several replicas under load while some are killed or stopped, and checks of the API server's audit log.

The checks rely on resourceVersions, which order all writes of a cluster: the versions of a Lease say which replica held
a shard between two of them, and the User-Agent says which replica wrote an object. So a write out of order is found
however short an overlap was, without any clock. Times are used only for how long users waited.
"""

import bisect
import itertools
import random
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Final

from operator_app.api.kinds import ENVOY_PROXY, LEASE, NAMESPACE, PROXY_REGISTRATION, SERVICE, Key
from operator_app.desired import child_key
from operator_app.sharding.hashing import shard_of
from operator_app.sharding.leases import shard_lease_name
from tests.e2e.controlplane import AuditEntry, AuditLog
from tests.e2e.controlplane.audit import Mark
from tests.e2e.kube import Kube, KubeError, wait_until
from tests.e2e.operator_process import OPERATOR_NAMESPACE, OperatorProcess
from tests.e2e.proxies import OPERATOR_USER, a_proxy, holds, wait_reconciled

SUCCESS: Final = range(200, 300)
EDIT_ANNOTATION: Final = "failover.test/edit"
"""The annotation of a Service that has the number of the last edit."""


@dataclass(frozen=True, slots=True)
class Tenure:
    """From resourceVersion ``since`` on, ``replica`` (None: nobody) held the shard, in ``epoch``."""

    since: int
    replica: str | None
    epoch: int


def replica_of(entry: AuditEntry) -> str:
    """The name of the replica that sent a request."""
    return entry.user_agent.partition("/")[2]


def tenures(entries: Iterable[AuditEntry], shards: int) -> dict[int, list[Tenure]]:
    """Who held each shard, in order, by the successful writes of its Lease."""
    numbers = {shard_lease_name(shard): shard for shard in range(shards)}
    found: dict[int, list[Tenure]] = {shard: [] for shard in numbers.values()}
    for each in entries:
        is_done = each.resource == LEASE.plural and each.name in numbers and each.code in SUCCESS
        if is_done and each.resource_version and each.request and each.verb != "delete":
            spec = each.request["spec"]
            tenure = Tenure(int(each.resource_version), spec.get("holderIdentity"), spec["leaseTransitions"])
            found[numbers[each.name]].append(tenure)
    for each_shard in found.values():
        each_shard.sort(key=lambda tenure: tenure.since)
    return found


def out_of_order(entries: Sequence[AuditEntry], shards: int, namespaces: Iterable[str]) -> list[str]:
    """Every write of an object in ``namespaces``, or of their entries, by a replica that did not hold the shard."""
    history = tenures(entries, shards)
    namespaces_of_records = {}
    for each in entries:
        if each.resource == PROXY_REGISTRATION.plural and each.request and "spec" in each.request:
            namespaces_of_records[each.name] = each.request["spec"]["proxy"]["namespace"]
    wanted, found = frozenset(namespaces), []
    for each in entries:
        tenant = (
            namespaces_of_records.get(each.name, "") if each.resource == PROXY_REGISTRATION.plural else each.namespace
        )
        if tenant not in wanted or each.code not in SUCCESS or not each.resource_version or not each.is_write:
            continue
        shard = history[shard_of(tenant, shards)]
        before = bisect.bisect_right(shard, int(each.resource_version), key=lambda tenure: tenure.since)
        holder = shard[before - 1] if before else None
        if holder is None or holder.replica != replica_of(each):
            found.append(f"{each} at {each.resource_version} by {replica_of(each)}, but the holder was {holder}")
    return found


def epochs_out_of_order(entries: Iterable[AuditEntry], shards: int) -> list[str]:
    """Every change of holder that did not increase the epoch, and every epoch that decreased."""
    found = []
    for shard, history in tenures(entries, shards).items():
        for before, after in itertools.pairwise(history):
            is_handover = after.replica is not None and after.replica != before.replica
            if after.epoch < before.epoch + is_handover:
                found.append(f"shard {shard}: {before} and then {after}")
    return found


@dataclass(frozen=True, slots=True)
class Edit:
    """A user's edit: when it was requested, and the generation that it made."""

    key: Key
    generation: int
    at: datetime


@dataclass
class Load:
    """Users who edit proxies all the time, by an annotation of their Services."""

    admin: Kube
    keys: Sequence[Key]
    interval_s: float
    edits: list[Edit] = field(default_factory=list)
    last: dict[Key, str] = field(default_factory=dict)
    failures: list[str] = field(default_factory=list)
    _ended: threading.Event = field(default_factory=threading.Event)

    @contextmanager
    def running(self) -> Iterator[None]:
        """Edit for as long as the context lasts. Raises ``AssertionError`` if an edit failed."""
        thread = threading.Thread(target=self._run, name="load")
        thread.start()
        try:
            yield
        finally:
            self.stop()
            thread.join()
        assert self.failures == []

    def stop(self) -> None:
        """Edit no more, before the context ends."""
        self._ended.set()

    def _run(self) -> None:
        rand = random.Random(1)  # noqa: S311 - reproducible
        while not self._ended.wait(self.interval_s):
            key, mark = rand.choice(self.keys), str(len(self.edits))
            started_at = datetime.now(UTC)
            try:
                edit = {"spec": {"service": {"annotations": {EDIT_ANNOTATION: mark}}}}
                stored = self.admin.patch(ENVOY_PROXY, key, edit)
            except KubeError as error:
                self.failures.append(str(error))
                return
            self.edits.append(Edit(key, stored["metadata"]["generation"], started_at))
            self.last[key] = mark

    def lost(self) -> list[str]:
        """The proxies whose Services lack the last edit."""
        found = []
        for key, mark in self.last.items():
            annotations = self.admin.get(SERVICE, child_key(key))["metadata"].get("annotations", {})
            if annotations.get(EDIT_ANNOTATION) != mark:
                found.append(f"{key}: {annotations.get(EDIT_ANNOTATION)} instead of {mark}")
        return found


def waits(entries: Iterable[AuditEntry], edits: Iterable[Edit]) -> list[tuple[Edit, timedelta]]:
    """The time from each edit to the first status write that confirms it or a later edit of the same proxy."""
    confirmed: defaultdict[Key, list[tuple[datetime, int]]] = defaultdict(list)
    confirms = holds("Reconciled", generation=0)
    for each in entries:
        is_status = each.resource == ENVOY_PROXY.plural and each.subresource == "status" and each.code == 200
        if is_status and each.request and confirms(each.request):
            generation = each.request["status"]["observedGeneration"]
            confirmed[Key(each.namespace, each.name)].append((each.received_at, generation))
    found = []
    for edit in edits:
        moments = [at for at, generation in confirmed[edit.key] if generation >= edit.generation and at >= edit.at]
        assert moments, f"{edit} was never confirmed"
        found.append((edit, min(moments) - edit.at))
    return found


def waits_until_applied(entries: Iterable[AuditEntry], edits: Sequence[Edit]) -> list[timedelta]:
    """The time from each of a load's edits, in their order, to the first apply to the Service that carries it.

    A later edit of the same proxy carries it, too.
    """
    applied: defaultdict[Key, list[tuple[datetime, int]]] = defaultdict(list)
    for each in entries:
        annotations = ((each.request or {}).get("metadata") or {}).get("annotations") or {}
        if each.resource == SERVICE.plural and each.code in SUCCESS and EDIT_ANNOTATION in annotations:
            applied[Key(each.namespace, each.name)].append((each.received_at, int(annotations[EDIT_ANNOTATION])))
    found = []
    for number, edit in enumerate(edits):
        moments = [at for at, mark in applied[child_key(edit.key)] if mark >= number and at >= edit.at]
        assert moments, f"{edit} was never applied"
        found.append(min(moments) - edit.at)
    return found


@dataclass(frozen=True, slots=True)
class Disruption:
    """What was done to a replica, when, and which shards it held."""

    what: str
    replica: str
    at: datetime
    until: datetime
    shards: tuple[int, ...]


class Fleet:
    """Replicas of one operator, and proxies of many tenants."""

    def __init__(
        self, admin: Kube, audit: AuditLog, replicas: Sequence[OperatorProcess], flags: Sequence[str], *, shards: int
    ) -> None:
        self.admin = admin
        self.audit = audit
        self.replicas = replicas
        self.shards = shards
        self.namespaces: list[str] = []
        self.keys: list[Key] = []
        self.disruptions: list[Disruption] = []
        self._flags = (*flags, f"--shards={shards}")

    def start(self) -> None:
        """Start all replicas, and wait until every shard is held."""
        self.mark: Mark = self.audit.mark()
        for each in self.replicas:
            each.start(*self._flags, wait=False)
        for each in self.replicas:
            each.wait_for("synced")
        self.wait_held(lambda holders: len(set(holders.values())) == min(len(self.replicas), self.shards))

    def populate(self, tag: str, *, tenants: int, proxies: int) -> None:
        """Create proxies without Pods in many namespaces, and wait until all of them are reconciled."""
        for tenant in range(tenants):
            name = f"{tag}-{tenant}"
            self.admin.create(NAMESPACE, {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name}})
            self.namespaces.append(name)
            for number in range(proxies):
                self.admin.create(ENVOY_PROXY, a_proxy(name, f"p{number}", replicas=0))
                self.keys.append(Key(name, f"p{number}"))
        for key in self.keys:
            wait_reconciled(self.admin, key)

    def holders(self) -> dict[int, str]:
        """The holders by shard, from the Leases."""
        found = {}
        for shard in range(self.shards):
            lease = self.admin.find(LEASE, Key(OPERATOR_NAMESPACE, shard_lease_name(shard)))
            holder = lease["spec"].get("holderIdentity") if lease else None
            if holder:
                found[shard] = holder
        return found

    def wait_held(self, is_enough: Callable[[dict[int, str]], bool], timeout_s: float = 30.0) -> None:
        """Wait until every shard is held and ``is_enough`` accepts the holders."""
        wait_until(
            lambda: len(held := self.holders()) == self.shards and is_enough(held), timeout_s, "every shard to be held"
        )

    def kill(self, victim: OperatorProcess, *, for_s: float) -> None:
        """``kill -9``; start a process of that name after ``for_s`` seconds, once others hold its shards."""
        with self._disruption("kill -9", victim, for_s):
            victim.kill()
        victim.start(*self._flags)

    def stop(self, victim: OperatorProcess, *, for_s: float) -> None:
        """SIGSTOP, and SIGCONT after ``for_s`` seconds and once others hold its shards."""
        with self._disruption("SIGSTOP", victim, for_s):
            victim.suspend()
        victim.resume()

    @contextmanager
    def _disruption(self, what: str, victim: OperatorProcess, for_s: float) -> Iterator[None]:
        held = tuple(shard for shard, holder in self.holders().items() if holder == victim.replica)
        started_at = datetime.now(UTC)
        yield
        time.sleep(for_s)
        self.disruptions.append(Disruption(what, victim.replica, started_at, datetime.now(UTC), held))
        self.wait_held(lambda holders: not set(held) & {s for s, h in holders.items() if h == victim.replica})

    def entries(self) -> list[AuditEntry]:
        """The operator's requests since the start."""
        return [each for each in self.audit.entries(self.mark) if each.user == OPERATOR_USER]

    def wait_reconciled(self) -> None:
        """Wait until every proxy is reconciled for its generation."""
        for key in self.keys:
            wait_reconciled(self.admin, key, 60.0)

    def delete_namespaces(self) -> None:
        """Request the deletion of all namespaces that were created."""
        for name in self.namespaces:
            self.admin.delete(NAMESPACE, Key("", name))


def longest_wait_s(disruption: Disruption, waited: Iterable[tuple[Edit, timedelta]], shards: int) -> float:
    """The longest wait for an edit in the replica's shards that was made during its disruption, in seconds."""
    waits_s = [
        wait.total_seconds()
        for edit, wait in waited
        if shard_of(edit.key.namespace, shards) in disruption.shards
        and disruption.at - timedelta(seconds=1) < edit.at < disruption.until
    ]
    return max(waits_s, default=0.0)
