"""Hostname claims: which proxy owns a hostname, so that no two ever own the same one.

A claim is a HostnameClaim named like the hostname, so the API server's uniqueness of names makes hostnames unique, and
its atomic create decides who was first. A claim is created before the hostname is written into the ledger or a
registry, and deleted after it is removed from both. Publishing the hostname does not belong here.
"""

from collections.abc import Callable
from typing import Final

from operator_app.api.kinds import FIELD_MANAGER, HOSTNAME_CLAIM, LABEL_MANAGED_BY, Key, Object
from operator_app.apply import NAME_CONFLICT, Applier, Ownership, OwnershipCheck
from operator_app.kube.deltas import Deleted
from operator_app.kube.preconditions import pinned_uid
from operator_app.kube.store import Store
from operator_app.registration.ledger import proxy_of
from operator_app.registration.registry import Registration
from operator_app.results import Problem

HOSTNAME_TAKEN: Final = "HostnameTaken"
"""The reason of a problem with a hostname that another proxy owns; it ends with a watch event of the claim."""

HOSTNAME_ORPHANED: Final = "HostnameOrphaned"
"""The reason where an orphaned record of an earlier proxy of this name owns the hostname; it ends the same way."""


class Claims:
    """Acquires and releases claims. ``sink`` gets a ``Deleted`` for each claim that this operator deletes itself."""

    def __init__(self, applier: Applier, store: Store, *, namespace: str, sink: Callable[[Deleted], object]) -> None:
        self._applier = applier
        self._store = store
        self._namespace = namespace
        self._sink = sink

    async def acquire(self, hostname: str, proxy: Key, uid: str) -> Registration:
        """Create the claim on ``hostname`` for the proxy with this UID, or return the problem that prevents it.

        Sends no request when the store already shows the answer. Raises the API server's errors.
        """
        check = _check(proxy, uid)
        plan = await self._applier.plan(HOSTNAME_CLAIM, self._desired(hostname, proxy, uid), check, ask_server=False)
        result = await self._applier.execute(plan, check)
        problem = result.problem
        if problem is not None and problem.reason == NAME_CONFLICT:
            message = f"another proxy has the hostname {hostname}: choose another one, or wait until it is free"
            problem = Problem(HOSTNAME_TAKEN, message, needs_user_action=True, ends_with_event=True)
        return Registration(result.outcome, problem, result.requeue_after_s)

    def is_owner(self, hostname: str, uid: str) -> bool:
        """Whether the store has the claim on ``hostname`` with this proxy's UID."""
        live = self._store.get(HOSTNAME_CLAIM, Key(self._namespace, hostname))
        return live is not None and owner_uid(live) == uid

    def owner_uids(self, proxy: Key) -> frozenset[str]:
        """UIDs of all incarnations of ``proxy`` that own a claim in the store."""
        return frozenset(map(owner_uid, self._store.indexed(HOSTNAME_CLAIM, proxy)))

    async def release(self, proxy: Key, uid: str, *, keep: str | None = None) -> None:
        """Delete every claim of the proxy with this UID, except the one on the hostname ``keep``."""
        for live in self._store.indexed(HOSTNAME_CLAIM, proxy):
            if owner_uid(live) == uid and live["spec"]["hostname"] != keep:
                await self._applier.delete(HOSTNAME_CLAIM, live)
                self._sink(Deleted(HOSTNAME_CLAIM, live))

    def _desired(self, hostname: str, proxy: Key, uid: str) -> Object:
        return {
            "apiVersion": HOSTNAME_CLAIM.api_version,
            "kind": HOSTNAME_CLAIM.kind,
            "metadata": {
                "name": hostname,
                "namespace": self._namespace,
                "labels": {LABEL_MANAGED_BY: FIELD_MANAGER},
            },
            "spec": {
                "hostname": hostname,
                "proxy": {"namespace": proxy.namespace, "name": proxy.name, "uid": uid},
            },
        }


def owner_uid(claim: Object) -> str:
    """The UID of the proxy that a HostnameClaim, or a ProxyRegistration, is for."""
    uid: str = claim["spec"]["proxy"]["uid"]
    return uid


def _check(proxy: Key, uid: str) -> OwnershipCheck:
    def ownership(live: Object) -> Ownership:
        if owner_uid(live) == uid:
            return Ownership.OURS
        return Ownership.PREVIOUS_INCARNATION if proxy_of(live) == proxy else Ownership.FOREIGN

    return OwnershipCheck(ownership, pinned_uid, pinned_uid)
