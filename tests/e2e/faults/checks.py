"""What must hold when a run is over; every violation is a sentence. Pure.

The whole of what is declared is compared; what an object holds beside that is compared by the API server, at the end of
the campaign (``Campaign.check_all``).

Written against the API and the design, not against the operator's own comparison: every declared value is looked up in
the live object, and the status is recomputed from the numbers that the Deployment controller reports.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from typing import Final

from operator_app.api.kinds import (
    ALL_CHILD_KINDS,
    ANNOTATION_CONFIGURATION,
    DEPLOYMENT,
    ENVOY_PROXY,
    FIELD_MANAGER,
    HOSTNAME_CLAIM,
    LABEL_MANAGED_BY,
    POD,
    PROXY_REGISTRATION,
    Key,
    Object,
    Value,
)
from operator_app.api.models import parse_spec
from operator_app.api.records import RecordState
from operator_app.desired import child_key, children, selector_labels
from operator_app.envoy.files import rendered
from operator_app.registration.ledger import IN_CLUSTER
from operator_app.settings import Settings
from tests.e2e.budget import DONE
from tests.e2e.controlplane import AuditEntry
from tests.e2e.faults.observer import REGISTRY_KINDS, Address, View
from tests.e2e.faults.scenarios import FOREIGN_ANNOTATION, NAME, Scenario
from tests.e2e.operator_process import OPERATOR_NAMESPACE

_IMAGE: Final[str] = Settings.model_fields["image"].default


def problems(scenario: Scenario, namespace: str, view: View, foreign: View, uid: str) -> Iterator[str]:
    """Everything that is wrong about a namespace now; ``uid`` is the latest proxy that was created there."""
    key = Key(namespace, NAME)
    for address, before in foreign.items():
        if view.get(address) != before:
            yield f"a foreign {address[0]} was changed"
    records = {name: obj for (kind, name), obj in view.items() if kind == PROXY_REGISTRATION}
    claims = {name: obj for (kind, name), obj in view.items() if kind == HOSTNAME_CLAIM}
    managed = {
        address
        for address, obj in view.items()
        if address[0] in (ENVOY_PROXY, *ALL_CHILD_KINDS)
        and obj["metadata"].get("labels", {}).get(LABEL_MANAGED_BY) == FIELD_MANAGER
    }
    proxy = view.get((ENVOY_PROXY, key))
    if scenario.ends_gone:
        yield from (f"{kind} {name} is an orphan" for kind, name in managed)
        yield from (f"record {name} is an orphan" for name in records)
        yield from (f"claim {name} is an orphan" for name in claims)
        if proxy is not None:
            yield "the proxy is not gone"
        return
    if proxy is None or proxy["metadata"]["uid"] != uid:
        yield "the proxy is not there"
        return
    expected = _expected(proxy, view, foreign)
    yield from (f"{kind} {name} is an orphan" for kind, name in managed - expected.keys())
    yield from _child_problems(expected, view)
    yield from _annotation_problems(scenario, expected, view)
    if scenario.has_serving_pod:
        yield from _pod_problems(proxy, [obj for (kind, _), obj in view.items() if kind == POD])
    if scenario.has_stranger:
        yield from (f"{kind} {name} of a proxy without a Service" for kind, name in view if kind in REGISTRY_KINDS)
    else:
        yield from _record_problems(proxy, records)
        yield from _claim_problems(proxy, claims)
    deployment = view.get((DEPLOYMENT, child_key(key)))
    if deployment is not None:
        yield from _status_problems(proxy, deployment, has_stranger=scenario.has_stranger)


def _annotation_problems(scenario: Scenario, expected: Mapping[Address, Object], view: View) -> Iterator[str]:
    """Children that were prepared with another writer's annotation and have lost it."""
    for address in expected.keys() & view.keys():
        kind = address[0]
        is_original = scenario.is_prepared and kind in scenario.children_at_start and scenario.uids_of(kind.kind) == 1
        if is_original and FOREIGN_ANNOTATION not in view[address]["metadata"].get("annotations", {}):
            yield f"{address[0]}: another writer's annotation is lost"


def _pod_problems(proxy: Object, pods: Sequence[Object]) -> Iterator[str]:
    """There is one Pod, and its kubelet was made to fetch what the proxy declares; no touch is still to be repeated."""
    digests = [(each["metadata"].get("annotations") or {}).get(ANNOTATION_CONFIGURATION) for each in pods]
    wanted = rendered(parse_spec(proxy)).digest
    if digests != [wanted]:
        yield f"Pods were made to fetch {digests}, not {wanted}"
    conditions = (proxy.get("status") or {}).get("conditions", ())
    yield from (each["message"] for each in conditions if "can't be touched" in each["message"])


def child_problems(namespace: str, view: View) -> Iterator[str]:
    """What is wrong about the children of the proxy in a namespace alone."""
    proxy = view.get((ENVOY_PROXY, Key(namespace, NAME)))
    if proxy is not None:
        yield from _child_problems(_expected(proxy, view, {}), view)


def _expected(proxy: Object, view: View, foreign: View) -> dict[Address, Object]:
    """The children that there are to be, by address; not where a stranger has the name."""
    key = child_key(Key(proxy["metadata"]["namespace"], proxy["metadata"]["name"]))
    known = {kind: view.get((kind, key)) for kind in ALL_CHILD_KINDS}
    declared = children(proxy, parse_spec(proxy), default_image=_IMAGE, live=known)
    return {(kind, key): child for kind, child in declared.items() if (kind, key) not in foreign}


def _child_problems(expected: Mapping[Address, Object], view: View) -> Iterator[str]:
    for address, child in expected.items():
        live = view.get(address)
        if live is None:
            yield f"{address[0]} is missing"
        else:
            yield from (f"{address[0]}: {each} is not as declared" for each in _missing("", child, live))


def uid_problems(scenario: Scenario, uids: Mapping[str, tuple[str, ...]]) -> Iterator[str]:
    """Kinds whose objects were created more or less often than the scenario calls for; ``uids`` is by kind."""
    for kind, found in uids.items():
        wanted = scenario.uids_of(kind)
        if len(found) != wanted:
            yield f"{kind} had {len(found)} UIDs and not {wanted}: {', '.join(found)}"


def write_problems(
    writes: Iterable[AuditEntry], *, names: frozenset[str], pods: frozenset[str], may_repeat: bool
) -> Iterator[str]:
    """Writes of the operator about one namespace that are wrong: to foreign objects, or without any effect.

    ``pods`` are the names of Pods that serve, of which the status may be written.
    """
    latest: dict[tuple[str, str], AuditEntry] = {}
    for each in writes:
        is_touch = (each.resource, each.subresource) == (POD.plural, "status") and each.name in pods
        if each.resource != "events" and each.name not in names and not is_touch:
            yield f"wrote to a foreign object: {each}"
        if each.code not in DONE or each.verb == "delete" or each.resource_version is None or is_release(each):
            continue
        former = latest.get((each.resource, each.name))
        if former is not None and former.resource_version == each.resource_version and not may_repeat:
            yield f"avoidable write: {each}, {each.received_at - former.received_at} after {former}"
        latest[each.resource, each.name] = each


def late_writes(writes: Iterable[AuditEntry], settled_at: datetime, *, may_emit_events: bool) -> Iterator[str]:
    """Writes of the operator about one namespace after its run has settled, and what is new in a status.

    One status is expected: no Pod runs here, so each Deployment passes its deadline, 600 s after its last progress.
    """
    told: dict[str, tuple[str, ...]] = {}
    for each in writes:
        before = told
        if (each.resource, each.subresource) == (ENVOY_PROXY.plural, "status") and each.code in DONE:
            conditions = (each.request or {}).get("status", {}).get("conditions", ())
            told = {found["type"]: tuple(found.get(name, "") for name in _TOLD) for found in conditions}
        is_past_deadline = _is_past_deadline(told) and not _is_past_deadline(before)
        is_expected = is_past_deadline or (each.resource == "events" and may_emit_events)
        if each.received_at > settled_at and not is_expected:
            news = "; ".join(f"{name} {' '.join(found)}" for name, found in told.items() if before.get(name) != found)
            says = f", which says {news}" if news else ""
            yield f"needless write {each.received_at - settled_at} after the run settled: {each}{says}"


_TOLD: Final = ("status", "reason", "message")
"""Of a condition, what people read."""


def _is_past_deadline(told: Mapping[str, tuple[str, ...]]) -> bool:
    return any("ProgressDeadlineExceeded" in found for found in told.values())


def _reason_problems(
    conditions: Mapping[str, Object], wanted: int, *, is_available: bool, is_ready: bool, has_stranger: bool
) -> Iterator[str]:
    """Conditions with another reason than follows from the numbers: such a status is about to be written once more."""
    available = "NotEnoughReady" if not is_available else "ScaledToZero" if wanted == 0 else "EnoughReady"
    programmed = "ScaledToZero" if wanted == 0 else "NotAsked"
    reasons = {"Reconciled": "Verified", "Registered": "Confirmed", "Available": available, "Programmed": programmed}
    if has_stranger:
        # The Service is the stranger's, so the proxy has none with an address.
        reasons |= {"Reconciled": "NameConflict", "Registered": "NoAddress", "Ready": "NameConflict"}
    else:
        reasons["Ready"] = "Ready" if is_ready else "RollingOut" if is_available else available
    found = {name: conditions[name]["reason"] for name in reasons if name in conditions}
    if found != reasons:
        yield f"status has the reasons {found}, expected are {reasons}"


def is_release(write: AuditEntry) -> bool:
    """Whether a write removes our finalizer; where that deletes the proxy, the response has the version before it."""
    metadata = (write.request or {}).get("metadata", {})
    return write.resource == ENVOY_PROXY.plural and not write.subresource and not metadata.get("finalizers")


def _missing(path: str, declared: Value, live: Value) -> Iterator[str]:
    """Where ``live`` does not contain ``declared``; lists must agree item by item."""
    if isinstance(declared, dict) and isinstance(live, dict):
        for name, value in declared.items():
            yield from _missing(f"{path}.{name}", value, live.get(name))
    elif isinstance(declared, list) and isinstance(live, list) and len(declared) == len(live):
        for index, (wanted, found) in enumerate(zip(declared, live, strict=True)):
            yield from _missing(f"{path}[{index}]", wanted, found)
    elif declared != live:
        yield path


def _record_problems(proxy: Object, records: Mapping[Key, Object]) -> Iterator[str]:
    metadata = proxy["metadata"]
    key = Key(OPERATOR_NAMESPACE, f"proxy-{metadata['uid']}")
    if set(records) != {key}:
        yield f"records are {[each.name for each in records]}, not {key.name}"
        return
    listeners = parse_spec(proxy).listeners
    wanted = {
        "proxy": {"namespace": metadata["namespace"], "name": NAME, "uid": metadata["uid"]},
        "registry": IN_CLUSTER,
        "state": RecordState.REGISTERED.value,
        "generation": metadata["generation"],
        "hostname": proxy["spec"]["registration"]["hostname"],
        "address": f"{NAME}-envoy.{metadata['namespace']}.svc",
        "ports": [{"name": each.name, "port": each.port, "protocol": each.protocol.value} for each in listeners],
    }
    found = records[key]["spec"]
    if found != wanted:
        yield f"record is {found}, not {wanted}"


def _claim_problems(proxy: Object, claims: Mapping[Key, Object]) -> Iterator[str]:
    metadata, hostname = proxy["metadata"], proxy["spec"]["registration"]["hostname"]
    holder = {"namespace": metadata["namespace"], "name": NAME, "uid": metadata["uid"]}
    wanted = {Key("", hostname): {"hostname": hostname, "proxy": holder, "installation": OPERATOR_NAMESPACE}}
    found = {key: claim["spec"] for key, claim in claims.items()}
    if found != wanted:
        yield f"claims are {list(found.values())}, not {list(wanted.values())}"


def _status_problems(proxy: Object, deployment: Object, *, has_stranger: bool) -> Iterator[str]:
    status = proxy.get("status") or {}
    generation = proxy["metadata"]["generation"]
    conditions = {each["type"]: each for each in status.get("conditions", ())}
    reported = deployment.get("status") or {}
    if reported.get("observedGeneration", 0) < deployment["metadata"]["generation"]:
        yield "the Deployment controller has not observed the Deployment yet"
    wanted = deployment["spec"]["replicas"]
    if not wanted <= reported.get("replicas", 0) <= wanted + -(-wanted // 4):
        # The ReplicaSets' controller counts by itself, and its numbers arrive later; a rollout adds up to a quarter.
        yield f"the Deployment's controllers have not made its {wanted} Pods yet"
    is_available = reported.get("availableReplicas", 0) >= wanted - wanted // 4
    is_rolled_out = reported.get("updatedReplicas", 0) >= wanted and reported.get("replicas", 0) == reported.get(
        "updatedReplicas", 0
    )
    is_ready = is_available and is_rolled_out
    expected = {"Reconciled": True, "Registered": True, "Available": is_available, "Ready": is_ready}
    # No node runs a Pod here, so none is asked what it has loaded.
    expected["Programmed"] = wanted == 0
    is_past_deadline = any(each.get("reason") == "ProgressDeadlineExceeded" for each in reported.get("conditions", ()))
    if has_stranger:
        expected |= {"Reconciled": False, "Registered": False, "Ready": False, "Stalled": True}
    else:
        expected |= {} if is_ready else {"Stalled" if is_past_deadline else "Reconciling": True}
    found = {name: each["status"] == "True" for name, each in conditions.items() if name != "Contended"}
    if found != expected:
        yield f"status has {found}, expected is {expected}"
    yield from _reason_problems(
        conditions, wanted, is_available=is_available, is_ready=is_ready, has_stranger=has_stranger
    )
    if status.get("observedGeneration") != generation or any(
        each["observedGeneration"] != generation for each in conditions.values()
    ):
        yield f"status is not about generation {generation}"
    fields = {name: reported.get(name, 0) for name in ("replicas", "readyReplicas")}
    fields |= {"selector": ",".join(f"{name}={value}" for name, value in sorted(selector_labels(NAME).items()))}
    if not has_stranger:
        fields["address"] = f"{NAME}-envoy.{proxy['metadata']['namespace']}.svc"
    found_fields = {name: value for name, value in status.items() if name not in ("conditions", "observedGeneration")}
    if found_fields != fields:
        yield f"status has {found_fields}, not {fields}"
