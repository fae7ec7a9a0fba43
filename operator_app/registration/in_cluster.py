"""The default registry: one ProxyRegistration for each proxy, in the operator's own namespace.

The API server provides what a registry needs: a record's name is derived from the UID, so uniqueness of names is
uniqueness of records, and an apply that carries a resourceVersion is a compare-and-set.
"""

from operator_app.apply import NAME_CONFLICT, Action, Applier, Claim, Problem, Standing
from operator_app.cluster import Cluster
from operator_app.kinds import FIELD_MANAGER, LABEL_MANAGED_BY, PROXY_REGISTRATION, Key, Object
from operator_app.registration import Change, Finding, Record, Registration
from operator_app.store import Store


class InClusterRegistry:
    """Keeps records as objects of kind ProxyRegistration in ``namespace``."""

    def __init__(self, applier: Applier, cluster: Cluster, store: Store, *, namespace: str) -> None:
        self._applier = applier
        self._cluster = cluster
        self._store = store
        self._namespace = namespace

    async def register(self, record: Record) -> Registration:
        """See :class:`operator_app.registration.Registry`."""
        claim = _claim(record)
        plan = await self._applier.look(PROXY_REGISTRATION, self._desired(record), claim, ask_server=False)
        result = await self._applier.carry_out(plan, claim)
        if result.problem is not None and result.problem.reason == NAME_CONFLICT:
            message = f"the record {result.key} is not this proxy's to change"
            return Registration(Change.SKIPPED, Problem("RecordConflict", message, is_terminal=True))
        return Registration(Change(result.outcome.value), result.problem, result.again_after_s)

    async def observe(self, record: Record) -> Finding:
        """See :class:`operator_app.registration.Registry`."""
        plan = await self._applier.look(PROXY_REGISTRATION, self._desired(record), _claim(record))
        match plan.action:
            case Action.CREATE:
                return Finding.ABSENT
            case Action.NOTHING:
                return Finding.MATCHING
            case Action.REPAIR:
                return Finding.DIFFERENT
            case _:
                return Finding.FOREIGN

    async def deregister(self, uid: str) -> None:
        """See :class:`operator_app.registration.Registry`."""
        key = self._key(uid)
        live = self._store.get(PROXY_REGISTRATION, key) or await self._cluster.get(PROXY_REGISTRATION, key)
        if live is not None and _uid_of(live) == uid:
            await self._applier.delete(PROXY_REGISTRATION, live)

    def known_lives(self, proxy: Key) -> tuple[str, ...]:
        """See :class:`operator_app.registration.Registry`."""
        return tuple(_uid_of(record) for record in self._store.indexed(PROXY_REGISTRATION, proxy))

    def _key(self, uid: str) -> Key:
        return Key(self._namespace, f"proxy-{uid}")

    def _desired(self, record: Record) -> Object:
        key = self._key(record.uid)
        spec: Object = {
            "proxy": {"namespace": record.proxy.namespace, "name": record.proxy.name, "uid": record.uid},
            "generation": record.generation,
            "address": record.address,
            "ports": [{"name": port.name, "port": port.port, "protocol": port.protocol.value} for port in record.ports],
        }
        if record.hostname is not None:
            spec["hostname"] = record.hostname
        return {
            "apiVersion": PROXY_REGISTRATION.api_version,
            "kind": PROXY_REGISTRATION.kind,
            "metadata": {
                "name": key.name,
                "namespace": key.namespace,
                "labels": {LABEL_MANAGED_BY: FIELD_MANAGER},
            },
            "spec": spec,
        }


def proxy_of(record: Object) -> Key:
    """The address of the proxy that a ProxyRegistration names."""
    reference = record["spec"]["proxy"]
    return Key(reference["namespace"], reference["name"])


def _uid_of(record: Object) -> str:
    uid: str = record["spec"]["proxy"]["uid"]
    return uid


def _claim(record: Record) -> Claim:
    """Ours is what carries our UID; a record made from a newer generation than ours is not ours to change any more."""

    def standing(live: Object) -> Standing:
        is_ours = _uid_of(live) == record.uid and live["spec"]["generation"] <= record.generation
        return Standing.OURS if is_ours else Standing.FOREIGN

    def precondition(live: Object) -> dict[str, str]:
        return {"uid": live["metadata"]["uid"], "resourceVersion": live["metadata"]["resourceVersion"]}

    return Claim(standing, precondition)
