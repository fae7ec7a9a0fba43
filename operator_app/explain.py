"""What the operator sees of one proxy: for each child and field the owner, the declared and the live value.

The plans are those of a reconcile, made from live reads; nothing is written.
"""

from collections.abc import Iterator
from typing import Final

from operator_app.api.kinds import CHILD_KINDS, ENVOY_PROXY, FIELD_MANAGER, Key, Object, key_of
from operator_app.api.models import parse_spec
from operator_app.apply import Action, Plan, child_check, plan
from operator_app.desired import child_key, children
from operator_app.errors import NotFoundError
from operator_app.kube.client import Cluster
from operator_app.ssa.changes import as_text, shown
from operator_app.ssa.fields import Difference, Drift, dotted, foreign_fields, owned_values, owners_of

_MOST_FOREIGN: Final = 30
"""Foreign fields of one child that are shown."""

_ACTIONS = {
    Action.NOTHING: "holds; nothing to write",
    Action.CREATE: "does not exist; the next reconcile creates it",
    Action.REPAIR: "differs; the next reconcile writes the fields marked with !",
    Action.WAIT: "waits",
    Action.LEAVE: "is left alone",
}


async def explain(
    cluster: Cluster, key: Key, *, default_image: str, installation: str, run_as_user: bool = True
) -> str:
    """A report on the proxy at ``key``.

    Raises ``NotFoundError`` when there is none, and ``pydantic.ValidationError`` when its spec can't be read.
    """
    proxy = await cluster.get(ENVOY_PROXY, key)
    if proxy is None:
        raise NotFoundError("NotFound", "there is no such object", kind=ENVOY_PROXY, key=key)
    spec = parse_spec(proxy)
    lines = list(_heading(proxy, is_paused=spec.paused))
    check = child_check(proxy)
    live = {kind: await cluster.get(kind, child_key(key)) for kind in CHILD_KINDS}
    declared = children(
        proxy, spec, default_image=default_image, installation=installation, run_as_user=run_as_user, live=live
    )
    for kind, desired in declared.items():
        lines += ["", *_child(plan(kind, desired, live[kind], check))]
    return "\n".join(lines) + "\n"


def _heading(proxy: Object, *, is_paused: bool) -> Iterator[str]:
    metadata, status = proxy["metadata"], proxy.get("status") or {}
    yield f"EnvoyProxy {key_of(proxy)}, generation {metadata['generation']}, uid {metadata['uid']}"
    if "deletionTimestamp" in metadata:
        yield f"  is being deleted since {metadata['deletionTimestamp']}; nothing is written to its children any more"
    if is_paused:
        yield "  is paused; nothing below is written until spec.paused is false"
    for condition in status.get("conditions", ()):
        yield (
            f"  {condition['type']}={condition['status']} ({condition['reason']}) for generation "
            f"{condition['observedGeneration']}, since {condition['lastTransitionTime']}: {condition['message']}"
        )


def _child(planned: Plan) -> Iterator[str]:
    action = planned.problem.message if planned.problem else _ACTIONS[planned.action]
    yield f"{planned.kind} {planned.key}: {action}"
    if planned.live is None or planned.action not in (Action.NOTHING, Action.REPAIR):
        return
    differing = {each.path for each in planned.differences}
    for path, value in owned_values(planned.live):
        if path not in differing:
            others = owners_of(path, planned.live)
            owners = ", ".join((FIELD_MANAGER, *others))
            yield f"    {dotted(path)}  owner {owners}  = {as_text(shown(path, value))}"
    for field in foreign_fields(planned.live, ("f:spec",), most=_MOST_FOREIGN):
        yield f"  + {field}"
    for each in planned.differences:
        yield f"  ! {_difference(planned.live, each)}"


def _difference(live: Object, difference: Difference) -> str:
    others = owners_of(difference.path, live)
    owners = others if difference.drift is Drift.NOT_OWNED else (FIELD_MANAGER, *others)
    desired = as_text(shown(difference.path, difference.desired))
    found = as_text(shown(difference.path, difference.live))
    owner = ", ".join(owners) or "nobody"
    return f"{difference}  owner {owner}  desired {desired}  live {found}  ({difference.drift.value})"
