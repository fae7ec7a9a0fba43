"""Mutants that once survived every unit test, as replacements in the text. Each one is a guarantee that was untested.

A text that is not there any more makes the run fail: then the guarantee has moved, and its mutant has to follow.
"""

from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, slots=True)
class Named:
    """``old`` in ``module`` becomes ``new``, and one of ``tests`` must fail. ``old`` occurs once."""

    name: str
    module: str
    old: str
    new: str
    tests: tuple[str, ...]


_APPLY: Final = ("tests/unit/test_apply.py",)
_CLEANUP: Final = ("tests/unit/test_cleanup.py",)
_FIELDS: Final = ("tests/unit/ssa/test_fields.py",)
_RECONCILE: Final = ("tests/unit/test_reconcile.py",)
_REGISTRATION: Final = ("tests/unit/registration/test_registrar.py", "tests/unit/registration/test_audit.py")
_SHARDING: Final = ("tests/unit/sharding/test_elector.py",)
_UNBLOCK: Final = ("tests/unit/ssa/test_unblock.py",)
_WIRING: Final = ("tests/unit/test_wiring.py",)
_WORKERS: Final = ("tests/unit/controller/test_workers.py",)

NAMED: Final[tuple[Named, ...]] = (
    Named(
        "a repair after unblocking without a precondition",
        "operator_app/apply.py",
        "            body = _with_metadata(plan.desired, check.precondition(cleared))\n",
        "            body = _with_metadata(plan.desired, {})\n",
        _APPLY,
    ),
    Named(
        "a merge patch that is not pinned to a version",
        "operator_app/apply.py",
        'pinned = patch | {"metadata": patch.get("metadata", {}) | pinned_version(live)}',
        "pinned = patch",
        _APPLY,
    ),
    Named(
        "a repair that deletes what others declared around ours",
        "operator_app/ssa/unblock.py",
        "    after = copy.deepcopy(before)\n",
        "    after = copy.deepcopy(before)\n"
        '    for name in (after["spec"] or {}).keys() - desired["spec"].keys():\n'
        '        del after["spec"][name]\n',
        _UNBLOCK,
    ),
    Named(
        "a refusal of anything that removes what excludes ours",
        "operator_app/ssa/unblock.py",
        '    return any(field == place or field.startswith((f"{place}.", f"{place}[")) for field in fields)\n',
        "    return bool(place)\n",
        _UNBLOCK,
    ),
    Named(
        "a create that takes our object for as declared",
        "operator_app/apply.py",
        "            return await self._execute(replanned,",
        "            if replanned.live is not None:\n"
        "                replanned = replace(replanned, action=Action.NOTHING)\n"
        "            return await self._execute(replanned,",
        _APPLY,
    ),
    Named(
        "a write of unknown fate that is not read",
        "operator_app/apply.py",
        "        self._of_unknown_fate.add(written)\n",
        "",
        _APPLY,
    ),
    Named(
        "an orphaned child that is not pinned to a version",
        "operator_app/cleanup.py",
        'patch = {"metadata": pinned_version(live) | {',
        'patch = {"metadata": {"uid": live["metadata"]["uid"]} | {',
        _CLEANUP,
    ),
    Named(
        "a confirmation that is not pinned to a version",
        "operator_app/registration/ledger.py",
        'for name in ("name", "namespace", "resourceVersion")}',
        'for name in ("name", "namespace")}',
        _REGISTRATION,
    ),
    Named(
        "a refresh that learns another UID",
        "operator_app/reconcile.py",
        'if live is None or live["metadata"]["uid"] != known["metadata"]["uid"]:',
        "if live is None:",
        _RECONCILE,
    ),
    Named(
        "a step of a change that counts as a repair",
        "operator_app/reconcile.py",
        "observed_current_generation(proxy) and not is_next",
        "observed_current_generation(proxy)",
        _RECONCILE,
    ),
    Named(
        "a Deployment that does not wait for its ConfigMap",
        "operator_app/reconcile.py",
        "                await is_over[prerequisite].wait()\n",
        "                await anyio.sleep(0)\n",
        _RECONCILE,
    ),
    Named(
        "a fenced write that is sent",
        "operator_app/app.py",
        "            metrics.fenced_writes.inc()\n            raise\n",
        "            metrics.fenced_writes.inc()\n",
        _WIRING,
    ),
    Named(
        "a start with one kind listed",
        "operator_app/controller/scopes.py",
        "        return all(self._store.is_synced(",
        "        return any(self._store.is_synced(",
        _WIRING,
    ),
    Named(
        "an audit that does not read the proxy again",
        "operator_app/registration/audit.py",
        "if finding.kind not in FIXABLE or await _is_live(cluster, finding):",
        "if finding.kind not in FIXABLE:",
        _REGISTRATION,
    ),
    Named(
        "an audit that deletes anybody's claim",
        "operator_app/registration/audit.py",
        "    if claim is None or owner_uid(claim) != uid or released_at(claim) is not None:\n",
        "    if claim is None or released_at(claim) is not None:\n",
        _REGISTRATION,
    ),
    Named(
        "an entry of any number of retiring names",
        "operator_app/registration/registrar.py",
        "if entry is None or len(retiring) < RETIRING_LIMIT:",
        "if True:",
        _REGISTRATION,
    ),
    Named(
        "a hostname that is published though another proxy has it",
        "operator_app/registration/registrar.py",
        "            record = replace(record, hostname=None)\n",
        "            pass\n",
        _REGISTRATION,
    ),
    Named(
        "a requested delay without bounds",
        "operator_app/controller/workers.py",
        "None if result.requeue_after_s is None else bounded_s(result.requeue_after_s)",
        "result.requeue_after_s",
        _WORKERS,
    ),
    Named(
        "workers that ignore backpressure",
        "operator_app/controller/workers.py",
        "return max(1, int(self._workers * self._backpressure.share(now_mono=time.monotonic())))",
        "return self._workers",
        _WORKERS,
    ),
    Named(
        "a queue that ignores backpressure",
        "operator_app/controller/workers.py",
        "at = now + self._backpressure.delay_s(priority, now_mono=now)",
        "at = now",
        _WIRING,
    ),
    Named(
        "a resync that keeps refusals",
        "operator_app/controller/resync_loop.py",
        "            self._applier.reset_rejected()\n",
        "",
        _WIRING,
    ),
    Named(
        "a Lease newer than a list that is taken for deleted",
        "operator_app/sharding/elector.py",
        "self._state.known(up_to=version)",
        "self._state.known(up_to=2**62)",
        _SHARDING,
    ),
    Named(
        "a tenant label that is ignored",
        "operator_app/controller/triggers.py",
        "        return tenant or namespace\n",
        "        return namespace\n",
        _WIRING,
    ),
    Named(
        "one lane for everybody",
        "operator_app/controller/triggers.py",
        "self._enqueue(key, self.tenant_of(key.namespace), priority)",
        'self._enqueue(key, "everybody", priority)',
        _WIRING,
    ),
    Named(
        "a user's edit without its priority",
        "operator_app/controller/triggers.py",
        "        return Priority.USER\n    return Priority.RESYNC if",
        "        return Priority.REPAIR\n    return Priority.RESYNC if",
        _WIRING,
    ),
    Named(
        "listed objects with the priority of repairs",
        "operator_app/controller/triggers.py",
        "return Priority.RESYNC if isinstance(delta, Listed) else Priority.REPAIR",
        "return Priority.REPAIR",
        _WIRING,
    ),
    Named(
        "a start that waits like a resync",
        "operator_app/controller/triggers.py",
        "Priority.USER if is_urgent else Priority.REPAIR",
        "Priority.USER if is_urgent else Priority.RESYNC",
        _WIRING,
    ),
    Named(
        "an operator that never releases a dropped field",
        "operator_app/ssa/fields.py",
        "        if name not in wanted:\n"
        "            yield Difference((*path, element), Drift.TO_RELEASE, _ABSENT, present.get(name))\n"
        "        else:\n",
        "        if name in wanted:\n",
        _FIELDS,
    ),
)
