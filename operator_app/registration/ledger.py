"""The ledger: one ProxyRegistration for each proxy, in the operator's own namespace, whatever registry is used.

It serves two purposes. For users of the cluster it is the registry ``in-cluster``: which proxy is reached at which
address. For the operator it is a write-ahead log of outside registries: a hostname is written here before it is
published, and removed from here after its removal outside is confirmed, so an entry lists every hostname that may be
published for its proxy.

The API server provides what that needs: an entry's name is derived from the proxy's UID, so there is one entry for each
proxy; an apply with a resourceVersion is a compare-and-set; and ``metadata.generation`` counts the versions of an
entry's spec, so that one number says which of them was confirmed.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, NamedTuple

from operator_app.api.kinds import (
    ENVOY_PROXY,
    FIELD_MANAGER,
    LABEL_MANAGED_BY,
    PROXY_REGISTRATION,
    Key,
    Kind,
    Object,
    key_of,
)
from operator_app.api.records import RecordState
from operator_app.apply import NAME_CONFLICT, Action, Applier, Ownership, OwnershipCheck
from operator_app.errors import ConflictError
from operator_app.kube.client import Cluster
from operator_app.kube.deltas import Deleted
from operator_app.kube.preconditions import identity, pinned_version
from operator_app.kube.store import Store
from operator_app.registration.identity import Installation
from operator_app.registration.registry import Record, Registration
from operator_app.results import Outcome, Problem

IN_CLUSTER: Final = "in-cluster"
"""The registry that is the ledger itself: nothing is published outside the cluster."""


class Name(NamedTuple):
    """A hostname in an outside registry."""

    registry: str
    hostname: str


@dataclass(frozen=True, slots=True)
class LedgerEntry:
    """The fields of one stored ProxyRegistration."""

    object: Object

    @property
    def uid(self) -> str:
        """The UID of the proxy."""
        uid: str = self.object["spec"]["proxy"]["uid"]
        return uid

    @property
    def proxy(self) -> Key:
        """Namespace and name of the proxy."""
        return proxy_of(self.object)

    @property
    def hostname(self) -> str | None:
        """The hostname that the proxy has now, published outside or not."""
        hostname: str | None = self.object["spec"].get("hostname")
        return hostname

    @property
    def state(self) -> RecordState:
        """Whether the proxy is registered, or why the entry is kept without it."""
        return RecordState(self.object["spec"]["state"])

    @property
    def published(self) -> Name | None:
        """The name that is to be published in an outside registry, if any."""
        registry: str = self.object["spec"]["registry"]
        return None if self.hostname is None or registry == IN_CLUSTER else Name(registry, self.hostname)

    @property
    def retiring(self) -> frozenset[Name]:
        """Names that may still be published, and have to be removed."""
        return frozenset(Name(each["registry"], each["hostname"]) for each in self.object["spec"].get("retiring") or ())

    @property
    def names(self) -> frozenset[Name]:
        """Every name that may be published for this proxy."""
        return self.retiring if self.published is None else self.retiring | {self.published}

    def record_of(self, name: Name) -> Record:
        """What the entry says of one of its names, as a registry gets it; the ports are left out."""
        spec = self.object["spec"]
        return Record(
            uid=self.uid,
            generation=spec["generation"],
            proxy=self.proxy,
            hostname=name.hostname,
            address=spec["address"],
            more_addresses=tuple(spec.get("moreAddresses") or ()),
            ports=(),
            ttl_s=spec.get("ttl"),
        )

    @property
    def installations(self) -> tuple[str, ...]:
        """The installations that the records of these names may carry, the latest last."""
        return tuple(self.object["spec"].get("installations") or ())

    @property
    def is_confirmed(self) -> bool:
        """Whether the registry has confirmed exactly this generation of the entry."""
        confirmed = (self.object.get("status") or {}).get("confirmedGeneration")
        return bool(confirmed == self.object["metadata"]["generation"])

    @property
    def confirmed_hostname(self) -> str | None:
        """The hostname that a registry has confirmed last, whatever has changed since."""
        hostname: str | None = (self.object.get("status") or {}).get("confirmedHostname")
        return self.hostname if hostname is None and self.is_confirmed else hostname

    def may_be_published(self, name: Name) -> bool:
        """Whether ``name`` was ever confirmed, so that it is outside until its removal is confirmed.

        Only for names that a registry says it could not have published: any other name of the entry may be outside,
        since a crash can come between a write outside and its confirmation.
        """
        return name.hostname == self.confirmed_hostname


@dataclass(frozen=True, slots=True)
class LedgerWrite:
    """The result of :meth:`Ledger.write`.

    Without an ``entry`` no registry may be called, and ``registration`` has the problem.
    """

    registration: Registration
    entry: LedgerEntry | None = None


class Ledger:
    """Reads and writes entries. ``on_write`` is called for every write, ``sink`` for every entry deleted here.

    ``installation`` is the one that registers outside; ``None`` where nothing is outside.
    """

    def __init__(
        self,
        applier: Applier,
        cluster: Cluster,
        store: Store,
        *,
        namespace: str,
        installation: Installation | None = None,
        on_write: Callable[[Kind, Outcome], None],
        sink: Callable[[Deleted], object],
    ) -> None:
        self._applier = applier
        self._cluster = cluster
        self._store = store
        self._namespace = namespace
        self._installation = installation
        self._on_write = on_write
        self._sink = sink

    def entries_of(self, proxy: Key) -> tuple[LedgerEntry, ...]:
        """The entries that the store has of all incarnations of ``proxy``."""
        return tuple(map(LedgerEntry, self._store.indexed(PROXY_REGISTRATION, proxy)))

    def known(self, proxy: Key, uid: str) -> LedgerEntry | None:
        """The entry that the store has of the incarnation of ``proxy`` with this UID."""
        return next((each for each in self.entries_of(proxy) if each.uid == uid), None)

    def holder_of(self, hostname: str, *, except_uid: str) -> str | None:
        """The UID of another proxy that declares ``hostname`` and for which a registry has confirmed it, if any."""
        for proxy in self._store.indexed(ENVOY_PROXY, hostname):
            uid: str = proxy["metadata"]["uid"]
            entry = None if uid == except_uid else self.known(key_of(proxy), uid)
            if entry is not None and entry.hostname == entry.confirmed_hostname == hostname:
                return uid
        return None

    def is_declared_by(self, hostname: str, uid: str) -> bool:
        """Whether the proxy with this UID exists and declares ``hostname``."""
        return any(each["metadata"]["uid"] == uid for each in self._store.indexed(ENVOY_PROXY, hostname))

    def entries_in(self, state: RecordState, is_counted: Callable[[str], bool]) -> tuple[LedgerEntry, ...]:
        """The entries in this state of proxies in all namespaces that are counted."""
        keys = [each for each in self._store.index_values(PROXY_REGISTRATION) if is_counted(each.namespace)]
        entries = (entry for key in keys for entry in self.entries_of(key))
        return tuple(each for each in entries if each.state is state)

    async def find(self, uid: str) -> LedgerEntry | None:
        """The entry of the proxy with this UID, from the store, or else from the API server. Raises its errors."""
        key = self._key(uid)
        live = self._store.get(PROXY_REGISTRATION, key) or await self._cluster.get(PROXY_REGISTRATION, key)
        return None if live is None or LedgerEntry(live).uid != uid else LedgerEntry(live)

    async def write(
        self, record: Record, registry: str, *, removed: frozenset[Name] = frozenset(), is_migrated: bool = False
    ) -> LedgerWrite:
        """Bring the entry to ``record`` in one apply; every other name that it had stays in it as retiring.

        ``removed`` are names whose removal outside is confirmed. Installations that the entry had stay in it as well,
        unless it ``is_migrated``: all records that are left outside are confirmed to carry the present one. Raises
        ``ConflictError`` when the stored entry lists names that the store's copy does not: no write ever loses a name.
        """
        desired = self._desired(record, registry, removed, is_migrated=is_migrated)
        check = _check(record, LedgerEntry(desired).names | removed)
        plan = await self._applier.plan(PROXY_REGISTRATION, desired, check, ask_server=False)
        result = await self._applier.execute(plan, check)
        problem = result.problem
        if problem is not None and problem.reason == NAME_CONFLICT:
            if result.live is not None and _is_ours(result.live, record):
                raise ConflictError("it names more than was known", kind=PROXY_REGISTRATION, key=result.key)
            message = f"the record {result.key} is of a newer generation than this one"
            return LedgerWrite(
                Registration(Outcome.SKIPPED, Problem("RecordConflict", message, needs_user_action=True))
            )
        entry = LedgerEntry(result.live) if result.live is not None and problem is None else None
        return LedgerWrite(Registration(result.outcome, problem, result.requeue_after_s), entry)

    async def matching(self, record: Record, registry: str) -> LedgerEntry | None:
        """The entry, if it equals ``record`` and lists no retiring names. Writes nothing."""
        desired = self._desired(record, registry, frozenset())
        plan = await self._applier.plan(PROXY_REGISTRATION, desired, _check(record, LedgerEntry(desired).names))
        if plan.action is not Action.NOTHING or plan.live is None:
            return None
        entry = LedgerEntry(plan.live)
        return None if entry.retiring else entry

    async def confirm(self, entry: LedgerEntry) -> None:
        """Store that the registry has exactly this generation of the entry."""
        await self._write_confirmed(entry, entry.object["metadata"]["generation"], entry.hostname)

    async def unconfirm(self, entry: LedgerEntry) -> None:
        """Store that the registry does not have what it had confirmed: later reconciles call it again."""
        await self._write_confirmed(entry, 0, entry.confirmed_hostname)

    async def forget_confirmed(self, entry: LedgerEntry) -> None:
        """Store that the hostname which was confirmed last is not outside any more."""
        await self._write_confirmed(entry, 0, None)

    async def set_state(self, entry: LedgerEntry, state: RecordState) -> None:
        """Write why the entry is kept although its proxy goes."""
        if entry.state is not state:
            await self._apply_spec(entry, entry.object["spec"] | {"state": state.value})

    async def retire(self, entry: LedgerEntry) -> LedgerEntry:
        """Make the entry's hostname a retiring one, without another in its place. Returns the stored entry."""
        spec = {name: value for name, value in entry.object["spec"].items() if name not in ("hostname", "ttl")}
        if entry.names:
            spec["retiring"] = [each._asdict() for each in sorted(entry.names)]
        return await self._apply_spec(entry, spec)

    async def remove_retired(self, entry: LedgerEntry) -> LedgerEntry:
        """Remove all retiring names from an entry. Returns the stored entry."""
        spec = {name: value for name, value in entry.object["spec"].items() if name != "retiring"}
        if entry.published is None:
            spec.pop("installations", None)
        return await self._apply_spec(entry, spec)

    async def delete(self, entry: LedgerEntry) -> None:
        """Delete exactly this version of the entry. Raises ``ConflictError`` when a newer one may list more names."""
        await self._applier.delete(PROXY_REGISTRATION, entry.object, at_this_version=True)
        self._sink(Deleted(PROXY_REGISTRATION, entry.object))

    async def _write_confirmed(self, entry: LedgerEntry, generation: int, hostname: str | None) -> None:
        """Apply the status to exactly the version that was read: the resourceVersion pins it, a UID would not."""
        metadata = {name: entry.object["metadata"][name] for name in ("name", "namespace", "resourceVersion")}
        status = {"confirmedGeneration": generation} | ({} if hostname is None else {"confirmedHostname": hostname})
        body = _object(metadata) | {"status": status}
        applied = await self._cluster.apply(PROXY_REGISTRATION, body, force=True, subresource="status")
        self._learn(entry, applied.object)

    async def _apply_spec(self, entry: LedgerEntry, spec: Object) -> LedgerEntry:
        pinned = identity(entry.object) | {"resourceVersion": entry.object["metadata"]["resourceVersion"]}
        body = _object(pinned | {"labels": {LABEL_MANAGED_BY: FIELD_MANAGER}}) | {"spec": spec}
        applied = await self._cluster.apply(PROXY_REGISTRATION, body, force=True)
        self._learn(entry, applied.object)
        return LedgerEntry(applied.object)

    def _learn(self, before: LedgerEntry, stored: Object) -> None:
        is_same = stored["metadata"]["resourceVersion"] == before.object["metadata"]["resourceVersion"]
        self._on_write(PROXY_REGISTRATION, Outcome.UNCHANGED if is_same else Outcome.CONFIGURED)
        self._store.learn(PROXY_REGISTRATION, stored)

    def _key(self, uid: str) -> Key:
        return Key(self._namespace, f"proxy-{uid}")

    def _desired(self, record: Record, registry: str, removed: frozenset[Name], *, is_migrated: bool = False) -> Object:
        key = self._key(record.uid)
        spec: Object = {
            "proxy": {"namespace": record.proxy.namespace, "name": record.proxy.name, "uid": record.uid},
            "generation": record.generation,
            "registry": registry,
            "state": RecordState.REGISTERED.value,
            "address": record.address,
            "ports": [{"name": port.name, "port": port.port, "protocol": port.protocol.value} for port in record.ports],
        }
        if record.more_addresses:
            spec["moreAddresses"] = list(record.more_addresses)
        if record.hostname is not None:
            spec["hostname"] = record.hostname
            if record.ttl_s is not None:
                spec["ttl"] = record.ttl_s
        metadata = {"name": key.name, "namespace": key.namespace, "labels": {LABEL_MANAGED_BY: FIELD_MANAGER}}
        desired = _object(metadata) | {"spec": spec}
        known = self._store.get(PROXY_REGISTRATION, key)
        listed = LedgerEntry(known).names if known is not None else frozenset()
        retiring = listed - {LedgerEntry(desired).published} - removed
        if retiring:
            spec["retiring"] = [each._asdict() for each in sorted(retiring)]
        if LedgerEntry(desired).names:
            before = () if known is None or is_migrated else LedgerEntry(known).installations
            present = () if self._installation is None else (str(self._installation),)
            installations = [*(each for each in before if each not in present), *present]
            if installations:
                spec["installations"] = installations
        return desired

    def is_migrated(self, entry: LedgerEntry) -> bool:
        """Whether the entry names no installation but the present one."""
        return set(entry.installations) <= {str(self._installation)}

    def is_of_another_cluster(self, entry: LedgerEntry) -> bool:
        """Whether the entry was written in other clusters only: it was restored from a backup of one, or copied."""
        named = tuple(filter(None, map(Installation.parsed, entry.installations)))
        ours = self._installation
        return ours is not None and bool(named) and not any(map(ours.is_same_cluster, named))

    def former(self, entry: LedgerEntry) -> frozenset[Installation]:
        """The installations that this one was before its id was changed, if the records may carry them."""
        return frozenset() if self._installation is None else self._installation.former(entry.installations)


def proxy_of(obj: Object) -> Key:
    """Namespace and name of the proxy that a ProxyRegistration or a HostnameClaim is for."""
    reference = obj["spec"]["proxy"]
    return Key(reference["namespace"], reference["name"])


def _object(metadata: Object) -> Object:
    return {"apiVersion": PROXY_REGISTRATION.api_version, "kind": PROXY_REGISTRATION.kind, "metadata": metadata}


def _is_ours(live: Object, record: Record) -> bool:
    return LedgerEntry(live).uid == record.uid and live["spec"]["generation"] <= record.generation


def _check(record: Record, accounted_for: frozenset[Name]) -> OwnershipCheck:
    """Ours is an entry with our UID and no newer generation, all of whose names are ``accounted_for``."""

    def ownership(live: Object) -> Ownership:
        is_ours = _is_ours(live, record) and LedgerEntry(live).names <= accounted_for
        return Ownership.OURS if is_ours else Ownership.FOREIGN

    return OwnershipCheck(ownership, pinned_version, pinned_version)
