"""The ledger: one ProxyRegistration for each proxy, in the operator's own namespace, whatever registry is used.

It is two things at once. To the cluster it is the registry ``in-cluster``: who is reached where. To the operator it is
a write-ahead log of the outside: a hostname is noted here before it is published anywhere, and struck out after its
removal is confirmed, so that whatever may stand outside in a proxy's name is named here.

The API server provides what that needs: an entry's name is derived from the UID, so uniqueness of names is uniqueness
of entries; an apply that carries a resourceVersion is a compare-and-set; and ``metadata.generation`` counts the
versions of an entry's spec, so that one number says which of them was confirmed.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, NamedTuple

from operator_app.api.kinds import FIELD_MANAGER, LABEL_MANAGED_BY, PROXY_REGISTRATION, Key, Kind, Object
from operator_app.api.records import RecordState
from operator_app.apply import NAME_CONFLICT, Action, Applier, Ownership, OwnershipCheck
from operator_app.errors import ConflictError
from operator_app.kube.client import Cluster
from operator_app.kube.deltas import Deleted
from operator_app.kube.preconditions import identity, pinned_version
from operator_app.kube.store import Store
from operator_app.registration.registry import Record, Registration
from operator_app.results import Outcome, Problem

IN_CLUSTER: Final = "in-cluster"
"""The registry that is the ledger itself: nothing stands outside."""


class Name(NamedTuple):
    """A hostname in an outside registry."""

    registry: str
    hostname: str


@dataclass(frozen=True, slots=True)
class LedgerEntry:
    """One stored ProxyRegistration, read."""

    object: Object

    @property
    def uid(self) -> str:
        """The UID of the proxy."""
        uid: str = self.object["spec"]["proxy"]["uid"]
        return uid

    @property
    def proxy(self) -> Key:
        """The address of the proxy."""
        return proxy_of(self.object)

    @property
    def hostname(self) -> str | None:
        """The name that the proxy has now, outside or not."""
        hostname: str | None = self.object["spec"].get("hostname")
        return hostname

    @property
    def state(self) -> RecordState:
        """Why there is an entry."""
        return RecordState(self.object["spec"]["state"])

    @property
    def published(self) -> Name | None:
        """The name that is to stand outside now."""
        registry: str = self.object["spec"]["registry"]
        return None if self.hostname is None or registry == IN_CLUSTER else Name(registry, self.hostname)

    @property
    def retiring(self) -> frozenset[Name]:
        """Names that may still stand outside and must go."""
        return frozenset(Name(each["registry"], each["hostname"]) for each in self.object["spec"].get("retiring") or ())

    @property
    def names(self) -> frozenset[Name]:
        """Every name that may stand outside for this proxy."""
        return self.retiring if self.published is None else self.retiring | {self.published}

    @property
    def is_confirmed(self) -> bool:
        """Whether the outside has confirmed exactly this version of the entry."""
        confirmed = (self.object.get("status") or {}).get("confirmedGeneration")
        return bool(confirmed == self.object["metadata"]["generation"])


@dataclass(frozen=True, slots=True)
class Noted:
    """What became of an entry; without an ``entry`` nothing may be done outside, and ``registration`` says why."""

    registration: Registration
    entry: LedgerEntry | None = None


class Ledger:
    """Reads and writes entries. ``on_write`` is told of every write, ``sink`` of what we deleted ourselves."""

    def __init__(
        self,
        applier: Applier,
        cluster: Cluster,
        store: Store,
        *,
        namespace: str,
        on_write: Callable[[Kind, Outcome], None],
        sink: Callable[[Deleted], object],
    ) -> None:
        self._applier = applier
        self._cluster = cluster
        self._store = store
        self._namespace = namespace
        self._on_write = on_write
        self._sink = sink

    def of(self, proxy: Key) -> tuple[LedgerEntry, ...]:
        """The known entries of every life of ``proxy``."""
        return tuple(map(LedgerEntry, self._store.indexed(PROXY_REGISTRATION, proxy)))

    async def find(self, uid: str) -> LedgerEntry | None:
        """The entry of a proxy; the API server is asked where none is known."""
        key = self._key(uid)
        live = self._store.get(PROXY_REGISTRATION, key) or await self._cluster.get(PROXY_REGISTRATION, key)
        return None if live is None or LedgerEntry(live).uid != uid else LedgerEntry(live)

    async def note(self, record: Record, registry: str, *, gone: frozenset[Name] = frozenset()) -> Noted:
        """Bring the entry to ``record`` in one apply; every other name that it had stays in it as retiring.

        ``gone`` are names whose removal is confirmed. Raises ``ConflictError`` when the entry has come to name more
        than was known: nothing is ever forgotten that way.
        """
        desired = self._desired(record, registry, gone)
        check = _check(record, LedgerEntry(desired).names | gone)
        plan = await self._applier.plan(PROXY_REGISTRATION, desired, check, ask_server=False)
        result = await self._applier.execute(plan, check)
        problem = result.problem
        if problem is not None and problem.reason == NAME_CONFLICT:
            if result.live is not None and _is_ours(result.live, record):
                raise ConflictError("it names more than was known", kind=PROXY_REGISTRATION, key=result.key)
            message = f"the record {result.key} is of a newer generation than this one"
            return Noted(Registration(Outcome.SKIPPED, Problem("RecordConflict", message, needs_user_action=True)))
        entry = LedgerEntry(result.live) if result.live is not None and problem is None else None
        return Noted(Registration(result.outcome, problem, result.requeue_after_s), entry)

    async def holding(self, record: Record, registry: str) -> LedgerEntry | None:
        """The entry, if it says exactly this and nothing is retiring. Writes nothing."""
        desired = self._desired(record, registry, frozenset())
        plan = await self._applier.plan(PROXY_REGISTRATION, desired, _check(record, LedgerEntry(desired).names))
        if plan.action is not Action.NOTHING or plan.live is None:
            return None
        entry = LedgerEntry(plan.live)
        return None if entry.retiring else entry

    async def confirm(self, entry: LedgerEntry) -> None:
        """Remember that the outside holds exactly this version of the entry."""
        await self._write_confirmed(entry, entry.object["metadata"]["generation"])

    async def doubt(self, entry: LedgerEntry) -> None:
        """Remember that the outside does not hold what it had confirmed."""
        await self._write_confirmed(entry, 0)

    async def mark(self, entry: LedgerEntry, state: RecordState) -> None:
        """Say why the entry outlives its proxy."""
        if entry.state is not state:
            await self._amend(entry, entry.object["spec"] | {"state": state.value})

    async def remove_retired(self, entry: LedgerEntry) -> None:
        """Forget all retiring names of an entry whose proxy is gone."""
        spec = {name: value for name, value in entry.object["spec"].items() if name != "retiring"}
        await self._amend(entry, spec)

    async def forget(self, entry: LedgerEntry) -> None:
        """Delete exactly this entry. Raises ``ConflictError`` when it may have come to name more than was known."""
        await self._applier.delete(PROXY_REGISTRATION, entry.object, at_this_version=True)
        self._sink(Deleted(PROXY_REGISTRATION, entry.object))

    async def _write_confirmed(self, entry: LedgerEntry, generation: int) -> None:
        """A status apply checks no UID; the resourceVersion is what ties it to the version that was looked at."""
        metadata = {name: entry.object["metadata"][name] for name in ("name", "namespace", "resourceVersion")}
        body = _object(metadata) | {"status": {"confirmedGeneration": generation}}
        applied = await self._cluster.apply(PROXY_REGISTRATION, body, force=True, subresource="status")
        self._learn(entry, applied.object)

    async def _amend(self, entry: LedgerEntry, spec: Object) -> None:
        pinned = identity(entry.object) | {"resourceVersion": entry.object["metadata"]["resourceVersion"]}
        body = _object(pinned | {"labels": {LABEL_MANAGED_BY: FIELD_MANAGER}}) | {"spec": spec}
        applied = await self._cluster.apply(PROXY_REGISTRATION, body, force=True)
        self._learn(entry, applied.object)

    def _learn(self, before: LedgerEntry, stored: Object) -> None:
        is_same = stored["metadata"]["resourceVersion"] == before.object["metadata"]["resourceVersion"]
        self._on_write(PROXY_REGISTRATION, Outcome.UNCHANGED if is_same else Outcome.CONFIGURED)
        self._store.learn(PROXY_REGISTRATION, stored)

    def _key(self, uid: str) -> Key:
        return Key(self._namespace, f"proxy-{uid}")

    def _desired(self, record: Record, registry: str, gone: frozenset[Name]) -> Object:
        key = self._key(record.uid)
        spec: Object = {
            "proxy": {"namespace": record.proxy.namespace, "name": record.proxy.name, "uid": record.uid},
            "generation": record.generation,
            "registry": registry,
            "state": RecordState.REGISTERED.value,
            "address": record.address,
            "ports": [{"name": port.name, "port": port.port, "protocol": port.protocol.value} for port in record.ports],
        }
        if record.hostname is not None:
            spec["hostname"] = record.hostname
            if record.ttl_s is not None:
                spec["ttl"] = record.ttl_s
        metadata = {"name": key.name, "namespace": key.namespace, "labels": {LABEL_MANAGED_BY: FIELD_MANAGER}}
        desired = _object(metadata) | {"spec": spec}
        known = self._store.get(PROXY_REGISTRATION, key)
        retiring = (
            (LedgerEntry(known).names if known is not None else frozenset()) - {LedgerEntry(desired).published} - gone
        )
        if retiring:
            spec["retiring"] = [each._asdict() for each in sorted(retiring)]
        return desired


def proxy_of(obj: Object) -> Key:
    """The address of the proxy that a ProxyRegistration or a HostnameClaim names."""
    reference = obj["spec"]["proxy"]
    return Key(reference["namespace"], reference["name"])


def _object(metadata: Object) -> Object:
    return {"apiVersion": PROXY_REGISTRATION.api_version, "kind": PROXY_REGISTRATION.kind, "metadata": metadata}


def _is_ours(live: Object, record: Record) -> bool:
    return LedgerEntry(live).uid == record.uid and live["spec"]["generation"] <= record.generation


def _check(record: Record, accounted: frozenset[Name]) -> OwnershipCheck:
    """Ours is what carries our UID, is of no newer generation, and names nothing that we would forget."""

    def ownership(live: Object) -> Ownership:
        return Ownership.OURS if _is_ours(live, record) and LedgerEntry(live).names <= accounted else Ownership.FOREIGN

    return OwnershipCheck(ownership, pinned_version, pinned_version)
