"""Hostname claims: which proxy owns a hostname, so that no two ever own the same one.

A claim is a HostnameClaim named like the hostname, in no namespace, so the API server's uniqueness of names makes
hostnames unique in the cluster, whichever operators serve it, and its atomic create decides who was first. A claim is
created before the hostname is written into the ledger or a registry, and given back after it is removed from both.

A claim that is given back rests for a while: it stays, with the time of its release, and only proxies of the same
tenant may take it. So clients that still have the old address in a cache, or go on using the name, do not reach
somebody else; and a tenant that deletes a proxy and creates it again does not lose its hostname in between. Whoever
takes it does so with one write: between a deletion and a creation another tenant's proxy could take it.

Publishing the hostname does not belong here.
"""

from collections import defaultdict, deque
from collections.abc import Callable
from datetime import datetime
from typing import Final

from operator_app.api.kinds import FIELD_MANAGER, HOSTNAME_CLAIM, LABEL_MANAGED_BY, Key, Object
from operator_app.apply import NAME_CONFLICT, Applier, Ownership, OwnershipCheck
from operator_app.kube.client import Cluster
from operator_app.kube.deltas import Deleted
from operator_app.kube.preconditions import identity, pinned_version
from operator_app.kube.store import Store
from operator_app.registration.ledger import proxy_of
from operator_app.registration.registry import Registration
from operator_app.results import Outcome, Problem

HOSTNAME_TAKEN: Final = "HostnameTaken"
"""The reason of a problem with a hostname that another proxy owns; it ends with a watch event of the claim."""

HOSTNAME_ORPHANED: Final = "HostnameOrphaned"
"""The reason where an orphaned record of an earlier proxy of this name owns the hostname; it ends the same way."""

HOSTNAME_RESTING: Final = "HostnameResting"
"""The reason where another tenant has given the hostname back a short time ago."""


class Claims:
    """Acquires and releases claims of one installation, which is known by the operator's ``namespace``.

    ``sink`` gets a ``Deleted`` for each claim that this operator deletes itself, ``on_change`` each that it gives back
    or gives to another proxy. A claim rests for ``rest_s`` seconds; of one tenant at most ``resting_limit`` do, further
    ones are deleted. ``tenant_of`` gives the tenant of a namespace, ``now`` aware UTC.
    """

    def __init__(  # noqa: PLR0913 - what a release needs to know
        self,
        applier: Applier,
        cluster: Cluster,
        store: Store,
        *,
        namespace: str,
        sink: Callable[[Deleted], object],
        now: Callable[[], datetime],
        on_change: Callable[[Object], object] = lambda _: None,
        rest_s: float = 0.0,
        resting_limit: int = 0,
        tenant_of: Callable[[str], str] = lambda namespace: namespace,
    ) -> None:
        self._applier = applier
        self._cluster = cluster
        self._store = store
        self._namespace = namespace
        self._sink = sink
        self._on_change = on_change
        self._rest_s = rest_s
        self._resting_limit = resting_limit
        self._tenant_of = tenant_of
        self._now = now
        self._releases: defaultdict[str, deque[datetime]] = defaultdict(deque)

    async def acquire(self, hostname: str, proxy: Key, uid: str) -> Registration:
        """Create the claim on ``hostname`` for the proxy with this UID, or return the problem that prevents it.

        Sends no request when the store already shows the answer. Raises the API server's errors.
        """
        known = self._store.get(HOSTNAME_CLAIM, Key("", hostname))
        if known is not None and owner_uid(known) != uid and released_at(known) is not None:
            left_s = 0.0 if self._is_same_tenant(known, proxy) else self.rests_for_s(known)
            if left_s > 0:
                return _resting(hostname, left_s)
            if "deletionTimestamp" not in known["metadata"]:
                await self._rewrite(known, self._desired(hostname, proxy, uid)["spec"])
                return Registration(Outcome.CONFIGURED)
        check = _check(proxy, uid)
        plan = await self._applier.plan(HOSTNAME_CLAIM, self._desired(hostname, proxy, uid), check, ask_server=False)
        result = await self._applier.execute(plan, check)
        problem = result.problem
        if problem is not None and problem.reason == NAME_CONFLICT:
            message = f"another proxy has the hostname {hostname}: choose another one, or wait until it is free"
            problem = Problem(HOSTNAME_TAKEN, message, needs_user_action=True, ends_with_event=True)
        return Registration(result.outcome, problem, result.requeue_after_s)

    def is_owner(self, hostname: str, uid: str) -> bool:
        """Whether the store has the claim on ``hostname`` with this proxy's UID, and it was not given back."""
        live = self._store.get(HOSTNAME_CLAIM, Key("", hostname))
        return live is not None and owner_uid(live) == uid and released_at(live) is None

    def owner_uids(self, proxy: Key) -> frozenset[str]:
        """UIDs of all incarnations of ``proxy`` that have a claim in the store which does not rest."""
        claims = self._store.indexed(HOSTNAME_CLAIM, proxy)
        return frozenset(owner_uid(each) for each in claims if self.rests_for_s(each) <= 0)

    def next_rested_s(self, proxy: Key) -> float | None:
        """Seconds until the first of the resting claims of ``proxy`` has rested, and is to be deleted."""
        left_s = (self.rests_for_s(each) for each in self._store.indexed(HOSTNAME_CLAIM, proxy))
        return min((each for each in left_s if each > 0), default=None)

    def rests_for_s(self, claim: Object) -> float:
        """Seconds for which a claim still rests; 0 for one that was not given back, or has rested."""
        since = released_at(claim)
        return 0.0 if since is None else max(0.0, self._rest_s - (self._now() - since).total_seconds())

    async def release(self, proxy: Key, uid: str, *, keep: str | None = None) -> None:
        """Give back every claim of the proxy with this UID, except the one on the hostname ``keep``.

        Those that have rested are deleted.
        """
        for live in self._store.indexed(HOSTNAME_CLAIM, proxy):
            if owner_uid(live) == uid and live["spec"]["hostname"] != keep:
                await self._give_back(live)

    async def remove(self, proxy: Key, uid: str, hostname: str | None = None) -> None:
        """Delete every claim of the proxy with this UID, or the one on ``hostname``: they are not its to give back."""
        for live in self._store.indexed(HOSTNAME_CLAIM, proxy):
            if owner_uid(live) == uid and hostname in (None, live["spec"]["hostname"]):
                await self._delete(live)

    async def _give_back(self, live: Object) -> None:
        is_given_back = released_at(live) is not None
        if "deletionTimestamp" in live["metadata"] or (is_given_back and self.rests_for_s(live) > 0):
            return
        if is_given_back or not self._may_rest(self._tenant_of(proxy_of(live).namespace)):
            await self._delete(live)
            return
        released = self._now().isoformat(timespec="seconds").replace("+00:00", "Z")
        await self._rewrite(live, live["spec"] | {"releasedAt": released})

    async def _rewrite(self, live: Object, spec: Object) -> None:
        """Give exactly this version of a claim another spec; whoever had it may have it again by now."""
        body = _object(identity(live) | pinned_version(live) | {"labels": {LABEL_MANAGED_BY: FIELD_MANAGER}})
        applied = await self._cluster.apply(HOSTNAME_CLAIM, body | {"spec": spec}, force=True)
        self._applier.record_write(HOSTNAME_CLAIM, Outcome.CONFIGURED)
        self._store.learn(HOSTNAME_CLAIM, applied.object)
        self._on_change(applied.object)

    async def _delete(self, live: Object) -> None:
        # Exactly this version: the same object may be another proxy's by now.
        await self._applier.delete(HOSTNAME_CLAIM, live, at_this_version=True)
        self._sink(Deleted(HOSTNAME_CLAIM, live))

    def _may_rest(self, tenant: str) -> bool:
        """Whether one more hostname of ``tenant`` may rest; counts it if so."""
        if self._rest_s <= 0:
            return False
        releases, now = self._releases[tenant], self._now()
        while releases and (now - releases[0]).total_seconds() >= self._rest_s:
            releases.popleft()
        if len(releases) >= self._resting_limit:
            return False
        releases.append(now)
        return True

    def _is_same_tenant(self, claim: Object, proxy: Key) -> bool:
        return self._tenant_of(proxy_of(claim).namespace) == self._tenant_of(proxy.namespace)

    def _desired(self, hostname: str, proxy: Key, uid: str) -> Object:
        return _object({"name": hostname, "labels": {LABEL_MANAGED_BY: FIELD_MANAGER}}) | {
            "spec": {
                "hostname": hostname,
                "proxy": {"namespace": proxy.namespace, "name": proxy.name, "uid": uid},
                "installation": self._namespace,
            },
        }


def owner_uid(claim: Object) -> str:
    """The UID of the proxy that a HostnameClaim, or a ProxyRegistration, is for."""
    uid: str = claim["spec"]["proxy"]["uid"]
    return uid


def released_at(claim: Object) -> datetime | None:
    """When a HostnameClaim was given back, in aware UTC; ``None`` while it is somebody's."""
    text: str | None = claim["spec"].get("releasedAt")
    return None if text is None else datetime.fromisoformat(text)


def _resting(hostname: str, left_s: float) -> Registration:
    message = (
        f"another tenant has given the hostname {hostname} back and could have it again; it is free in "
        f"{max(1, round(left_s / 60))} min"
    )
    return Registration(Outcome.SKIPPED, Problem(HOSTNAME_RESTING, message), requeue_after_s=left_s + 0.1)


def _object(metadata: Object) -> Object:
    return {"apiVersion": HOSTNAME_CLAIM.api_version, "kind": HOSTNAME_CLAIM.kind, "metadata": metadata}


def _check(proxy: Key, uid: str) -> OwnershipCheck:
    def ownership(live: Object) -> Ownership:
        if owner_uid(live) == uid:
            return Ownership.OURS
        return Ownership.PREVIOUS_INCARNATION if proxy_of(live) == proxy else Ownership.FOREIGN

    # Not by the UID alone: the same claim may be another proxy's by now.
    return OwnershipCheck(ownership, pinned_version, pinned_version)
