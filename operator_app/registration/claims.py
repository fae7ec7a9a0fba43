"""Hostname claims: which proxy has a hostname, so that no two ever have the same.

A claim is an object named like the hostname, so the API server's uniqueness of names is the uniqueness of hostnames,
and its atomic create decides who was first. A claim is there before anything says the name, and goes after the last
thing that said it is gone. Publishing the name does not belong here.
"""

from collections.abc import Callable
from typing import Final

from operator_app.api.kinds import FIELD_MANAGER, HOSTNAME_CLAIM, LABEL_MANAGED_BY, Key, Object
from operator_app.apply import NAME_CONFLICT, Action, Applier, Ownership, OwnershipCheck
from operator_app.kube.deltas import Deleted
from operator_app.kube.preconditions import pinned_uid
from operator_app.kube.store import Store
from operator_app.registration.ledger import proxy_of
from operator_app.registration.registry import Registration
from operator_app.results import Problem

HOSTNAME_TAKEN: Final = "HostnameTaken"
"""The reason of a problem with a hostname that another proxy has; it ends with an event on the claim."""

HOSTNAME_ORPHANED: Final = "HostnameOrphaned"
"""The reason of a problem with a hostname that an orphaned record of the same name has; it ends the same way."""

RECHECK_S: Final = 60.0
"""A proxy that waits for the claim of a former life comes back after this."""


class Claims:
    """Takes hostnames and gives them back. ``sink`` is told of claims that we deleted, as a watch would."""

    def __init__(self, applier: Applier, store: Store, *, namespace: str, sink: Callable[[Deleted], object]) -> None:
        self._applier = applier
        self._store = store
        self._namespace = namespace
        self._sink = sink

    async def acquire(self, hostname: str, proxy: Key, uid: str) -> Registration:
        """Have ``hostname`` for the proxy with this UID, or say why not. Sends nothing when that is clear already."""
        check = _check(proxy, uid)
        plan = await self._applier.plan(HOSTNAME_CLAIM, self._desired(hostname, proxy, uid), check, ask_server=False)
        result = await self._applier.execute(plan, check)
        problem = result.problem
        if problem is not None and problem.reason == NAME_CONFLICT:
            message = f"another proxy has the hostname {hostname}: choose another one, or wait until it is free"
            problem = Problem(HOSTNAME_TAKEN, message, needs_user_action=True, ends_with_event=True)
        requeue_after_s = result.requeue_after_s
        if problem is not None and plan.action is Action.WAIT:
            # The claim's deletion tells; this is for the case that it is told to nobody.
            requeue_after_s = RECHECK_S
        return Registration(result.outcome, problem, requeue_after_s)

    def holds(self, hostname: str, uid: str) -> bool:
        """Whether the proxy with this UID is known to have ``hostname``."""
        live = self._store.get(HOSTNAME_CLAIM, Key(self._namespace, hostname))
        return live is not None and holder_of(live) == uid

    def holders(self, proxy: Key) -> frozenset[str]:
        """UIDs of all lives of ``proxy`` that are known to have a hostname."""
        return frozenset(map(holder_of, self._store.indexed(HOSTNAME_CLAIM, proxy)))

    async def release(self, proxy: Key, uid: str, *, keep: str | None = None) -> None:
        """Free every hostname that the proxy with this UID has, except ``keep``."""
        for live in self._store.indexed(HOSTNAME_CLAIM, proxy):
            if holder_of(live) == uid and live["spec"]["hostname"] != keep:
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


def holder_of(claim: Object) -> str:
    """The UID of the proxy that has the hostname."""
    uid: str = claim["spec"]["proxy"]["uid"]
    return uid


def _check(proxy: Key, uid: str) -> OwnershipCheck:
    def ownership(live: Object) -> Ownership:
        if holder_of(live) == uid:
            return Ownership.OURS
        return Ownership.PREVIOUS_INCARNATION if proxy_of(live) == proxy else Ownership.FOREIGN

    return OwnershipCheck(ownership, pinned_uid, pinned_uid)
