"""The fault campaign can fail: claims are checked and mapped, every watched kind is tried, a missed fault fails."""

import json
import tempfile
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from pathlib import Path
from threading import Event
from typing import Any, Final

import httpx2
import pytest

from operator_app.api.kinds import (
    ALL_CHILD_KINDS,
    ANNOTATION_CONFIGURATION,
    CONFIG_MAP,
    ENVOY_PROXY,
    HOSTNAME_CLAIM,
    LEASE,
    POD,
    Key,
    Kind,
    Object,
)
from operator_app.api.models import parse_spec
from operator_app.controller.scopes import INDEXES
from operator_app.envoy.files import rendered
from tests.e2e.controlplane import AuditEntry, StartError
from tests.e2e.faults import __main__ as command
from tests.e2e.faults import checks, lives, outside
from tests.e2e.faults.campaign import Campaign, Run, foreign_objects
from tests.e2e.faults.catalogue import everything, starts
from tests.e2e.faults.injector import Injector
from tests.e2e.faults.observer import KINDS, Observer, View
from tests.e2e.faults.plan import KILLS, ON_THE_WIRE, Asked, Fault, FaultKind, Plan, Point, applicable, pairs
from tests.e2e.faults.report import page
from tests.e2e.faults.scenarios import NAME, SCENARIOS, fresh_proxy, hostnames
from tests.e2e.faults.selection import EVENTS, REQUESTS
from tests.e2e.kube import KubeError
from tests.e2e.operator_process import OPERATOR_NAMESPACE
from tests.unit.kube.scripted_client import kubeconfig_in

FIRST, _EDIT, _LOSS, _DRIFT, DELETION, _RE_CREATION, STRANGER, RIVAL, *_, SERVING = SCENARIOS
TEAM: Final = "team"
HOSTNAME, OTHER = hostnames(TEAM)


def a_claim(hostname: str, uid: str = "uid-1") -> Object:
    """A claim of the proxy in the namespace ``team``."""
    return {
        "apiVersion": HOSTNAME_CLAIM.api_version,
        "kind": HOSTNAME_CLAIM.kind,
        "metadata": {"name": hostname, "resourceVersion": "1", "uid": hostname},
        "spec": {
            "hostname": hostname,
            "proxy": {"namespace": TEAM, "name": NAME, "uid": uid},
            "installation": OPERATOR_NAMESPACE,
        },
    }


def view_of(*claims: Object) -> View:
    """A proxy that wants ``HOSTNAME``, and claims."""
    proxy = fresh_proxy(TEAM)
    proxy["metadata"] |= {"uid": "uid-1", "generation": 1}
    view: View = {(ENVOY_PROXY, Key(TEAM, NAME)): proxy}
    return view | {(HOSTNAME_CLAIM, Key("", each["metadata"]["name"])): each for each in claims}


def claim_problems(view: View) -> list[str]:
    """What the checks of a first reconcile find about claims."""
    return [each for each in checks.problems(FIRST, TEAM, view, {}, "uid-1") if each.startswith("claim")]


def test_exactly_the_wanted_hostname_is_to_be_claimed_by_exactly_this_proxy() -> None:
    """No claim, one of a previous incarnation, one of another hostname and one too many are each wrong."""
    assert claim_problems(view_of(a_claim(HOSTNAME))) == []
    for wrong in ((), (a_claim(HOSTNAME, "uid-0"),), (a_claim(OTHER),), (a_claim(HOSTNAME), a_claim(OTHER))):
        assert len(claim_problems(view_of(*wrong))) == 1


def test_a_claim_that_outlives_its_proxy_is_an_orphan() -> None:
    """After a deletion no claim may be left."""
    view = view_of(a_claim(HOSTNAME))
    del view[ENVOY_PROXY, Key(TEAM, NAME)]
    assert list(checks.problems(DELETION, TEAM, view, {}, "uid-1")) == [f"claim {HOSTNAME} is an orphan"]


def test_requests_and_events_of_claims_are_about_the_proxy_that_they_name() -> None:
    """A deletion has only the claim's name: the injector remembers which proxy it is about."""
    notices: list[Mapping[str, Any]] = []
    faults = tuple(
        Fault(point.verb, FaultKind.RESET, point, TEAM)
        for point in (Point(verb, HOSTNAME_CLAIM.kind) for verb in ("apply", "event", "delete"))
    )
    injector = Injector(Plan(faults), notices.append)
    claim = a_claim(HOSTNAME)
    address = (HOSTNAME_CLAIM.kind, "", "", HOSTNAME)

    injector.request(Asked("apply", *address), json.dumps(claim).encode())
    injector.event(HOSTNAME_CLAIM.kind, json.dumps({"type": "ADDED", "object": claim}).encode())
    injector.request(Asked("delete", *address), b"")

    assert notices == [{"injected": "apply"}, {"injected": "event"}, {"injected": "delete"}]


def test_starts_try_every_kind_that_the_operator_watches() -> None:
    """A kind that the operator begins to watch is tried by the campaign as well."""
    for verb in ("list", "watch"):
        tried = {run.point.kind for run in starts() if run.point is not None and run.point.verb == verb}
        assert tried == {kind.kind for kind in (*INDEXES, LEASE)}


@pytest.mark.parametrize(("is_injected", "code"), [(True, 0), (False, 1)])
def test_a_fault_that_was_never_injected_is_no_success(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *, is_injected: bool, code: int
) -> None:
    """The page and the output show it, and the exit code is 1 although every run that was made survived."""
    run = Run(FIRST, FaultKind.RESET, Point("apply", HOSTNAME_CLAIM.kind))
    run.is_injected = is_injected
    run.settled_at = datetime(2026, 7, 2, tzinfo=UTC) if is_injected else None
    monkeypatch.setattr(command, "_experiment", lambda *_: ([run], []))
    monkeypatch.setattr(command, "PAGE", tmp_path / "page.md")
    for part in (outside, lives):
        monkeypatch.setattr(part, "everything", lambda *_: [])

    assert command.main() == code

    assert ("not reached" in capsys.readouterr().out) is not is_injected
    assert ("| not reached |" in (tmp_path / "page.md").read_text()) is not is_injected


@pytest.mark.parametrize(
    ("has_logs", "is_injected", "is_kept"), [(True, False, True), (True, True, False), (False, False, False)]
)
def test_logs_are_kept_only_after_a_failure(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    *,
    has_logs: bool,
    is_injected: bool,
    is_kept: bool,
) -> None:
    """The temporary directory stays, and is named in the output, only where a run failed and an operator has logged."""
    run = Run(FIRST, FaultKind.RESET, Point("apply", HOSTNAME_CLAIM.kind))
    run.is_injected = is_injected
    run.settled_at = datetime(2026, 7, 2, tzinfo=UTC)

    def experiment(directory: Path, *_: object) -> tuple[list[Run], list[str]]:
        if has_logs:
            (directory / "operator.log").write_text("{}")
        return [run], []

    monkeypatch.setattr(command, "_experiment", experiment)
    monkeypatch.setattr(command, "PAGE", tmp_path / "page.md")
    for part in (outside, lives):
        monkeypatch.setattr(part, "everything", lambda *_: [])
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))

    command.main()

    left = list(tmp_path.glob(f"{command.DIRECTORY_PREFIX}*"))
    assert len(left) == int(is_kept)
    assert all(f"logs are in {each}" in capsys.readouterr().out for each in left)


def test_no_directory_stays_where_nothing_could_be_tried(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A control plane that does not start is an exit code of 1 and nothing else."""

    def experiment(*_: object) -> tuple[list[Run], list[str]]:
        raise StartError("etcd did not start")

    monkeypatch.setattr(command, "_experiment", experiment)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))

    assert command.main() == 1
    assert list(tmp_path.iterdir()) == []


def test_the_page_says_which_faults_only_a_resync_repairs() -> None:
    """And how often the resyncs were, since that is not how the operator runs by default."""
    head = " ".join(page([], quiet_s=20, resync_interval_s=6).split())
    assert "after *422*, *stale events replayed*, *event hidden* the operator" in head
    assert "one every 6 seconds" in head
    assert "one every 900 seconds" in head


def test_a_second_fault_is_armed_by_the_first_and_strikes_once() -> None:
    """At the next request about the same namespace, of whatever sort; events and other namespaces are spared."""
    notices: list[Mapping[str, Any]] = []
    first = Fault(TEAM, FaultKind.BROKEN, Point("apply", "ConfigMap"), TEAM, FaultKind.CONFLICT)
    injector = Injector(Plan((first,), recorded=("other",)), notices.append)
    service = Asked("apply", "Service", "", TEAM, "web-envoy")
    assert injector.request(Asked("apply", "ConfigMap", "", TEAM, "web-envoy"), b"") == first
    assert injector.request(Asked("apply", "Service", "", "other", "web-envoy"), b"") is None
    event = {"type": "MODIFIED", "object": {"metadata": {"namespace": TEAM, "name": "web-envoy"}}}
    assert injector.event("Service", json.dumps(event).encode()) is None
    second = injector.request(service, b"")
    assert second is not None
    assert second.kind is FaultKind.CONFLICT
    assert injector.request(service, b"") is None
    assert {each["injected"] for each in notices if "injected" in each} == Run(
        FIRST, first.kind, first.point, FaultKind.CONFLICT, namespace=TEAM
    ).fault_ids


def test_the_parts_of_a_campaign_are_the_whole_of_it() -> None:
    """Each run is in exactly one part, whatever way it has to be conducted in."""
    points = (Point("apply", "ConfigMap"), Point("event", "Service"), Point("create", "Event"))
    catalogue = everything({each.name: points for each in SCENARIOS})
    parts = catalogue.parts().values()
    assert all(catalogue.groups()), "every way is tried"
    assert sorted(id(run) for part in parts for run in part.runs()) == sorted(map(id, catalogue.runs()))


def test_some_scenarios_are_tried_only_where_no_other_is() -> None:
    """Requests and events of the kinds that they are about; all else of them the others try."""
    points = [Point("apply", kind.kind) for kind in ALL_CHILD_KINDS] + [Point("patch", POD.kind, "status")]
    catalogue = everything({each.name: points for each in SCENARIOS})
    tried = {
        scenario.name: {
            run.point.kind
            for run in catalogue.runs()
            if run.scenario is scenario and run.point and run.point.verb in ("apply", "patch")
        }
        for scenario in SCENARIOS
    }
    assert tried[SERVING.name] == {CONFIG_MAP.kind, POD.kind}
    assert tried[FIRST.name] == {point.kind for point in points}


def a_write(
    resource: str,
    name: str,
    subresource: str,
    received_at: datetime = datetime(2026, 7, 2, tzinfo=UTC),
    request: Object | None = None,
) -> AuditEntry:
    """A patch of the operator's in the namespace ``team``, as the audit log tells of it."""
    return AuditEntry(
        received_at=received_at,
        user="operator",
        user_agent="",
        path="",
        group="",
        verb="patch",
        resource=resource,
        subresource=subresource,
        namespace=TEAM,
        name=name,
        code=200,
        resource_version="7",
        request=request,
    )


def test_only_the_status_of_a_pod_that_serves_may_be_written() -> None:
    """A Pod of a scenario without one, its other fields, and any other Pod are foreign objects."""

    def problems(name: str, subresource: str) -> list[str]:
        write = a_write(POD.plural, name, subresource)
        return list(
            checks.write_problems([write], names=frozenset({NAME}), pods=frozenset({"web-1"}), may_repeat=False)
        )

    assert problems("web-1", "status") == []
    assert len(problems("web-1", "")) == len(problems("web-2", "status")) == 1


def test_after_a_run_has_settled_a_status_tells_of_the_deadline_alone() -> None:
    """Without a node each Deployment passes it once. Any other write is told with what it says, whenever it comes."""
    at = datetime(2026, 7, 2, tzinfo=UTC)

    def written(after_s: float, reason: str, resource: str = ENVOY_PROXY.plural) -> AuditEntry:
        stalled = {"type": "Stalled", "status": "True", "reason": reason, "message": "no Pod", "observedGeneration": 1}
        subresource = "status" if resource == ENVOY_PROXY.plural else ""
        content = {"status": {"conditions": [stalled]}}
        return a_write(resource, NAME, subresource, at + timedelta(seconds=after_s), content)

    before, deadline = written(-1, "Other"), written(590, "ProgressDeadlineExceeded")
    assert list(checks.late_writes([before, deadline], at, may_emit_events=False)) == []
    (again,) = checks.late_writes([before, deadline, written(591, "Other")], at, may_emit_events=False)
    assert "which says Stalled True Other no Pod" in again
    (twice,) = checks.late_writes([deadline, written(600, "ProgressDeadlineExceeded")], at, may_emit_events=False)
    assert "0:10:00 after" in twice
    event = written(1, "", "events")
    assert list(checks.late_writes([event], at, may_emit_events=True)) == []
    assert len(list(checks.late_writes([event], at, may_emit_events=False))) == 1


def test_a_pod_that_serves_was_made_to_fetch_what_is_declared() -> None:
    """One that was not, or for another content, is told."""
    proxy = fresh_proxy(TEAM)
    proxy["metadata"] |= {"uid": "uid-1", "generation": 1}
    wanted = rendered(parse_spec(proxy)).digest
    for annotations, is_wrong in (
        ({}, True),
        ({ANNOTATION_CONFIGURATION: "old"}, True),
        ({ANNOTATION_CONFIGURATION: wanted}, False),
    ):
        pod = {"metadata": {"namespace": TEAM, "name": "web-1", "annotations": annotations}}
        view: View = {(ENVOY_PROXY, Key(TEAM, NAME)): proxy, (POD, Key(TEAM, "web-1")): pod}
        found = [each for each in checks.problems(SERVING, TEAM, view, {}, "uid-1") if each.startswith("Pods")]
        assert bool(found) is is_wrong


def test_an_observer_goes_on_where_a_list_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """A new API server refuses lists for a moment, and what nobody observes looks as if it were missing."""
    refused: set[str] = set()
    listed = Event()

    class Admin:
        def request(self, _method: str, path: str) -> httpx2.Response:
            if path not in refused:
                refused.add(path)
                raise KubeError(f"GET {path}", 429, {"reason": "TooManyRequests"})
            items = [a_claim(HOSTNAME)] if HOSTNAME_CLAIM.plural in path else []
            return httpx2.Response(200, json={"items": items, "metadata": {"resourceVersion": "1"}})

    def watch(observer: Observer, kind: Kind, version: str) -> str:
        if kind == HOSTNAME_CLAIM:
            listed.set()
        observer._is_stopping.wait(10)
        return version

    monkeypatch.setattr(Observer, "_watch", watch)
    admin: Any = Admin()
    with Observer(admin) as observer:
        assert listed.wait(10)
        assert list(observer.view(TEAM)) == [(HOSTNAME_CLAIM, Key("", HOSTNAME))]
    assert len(refused) == len(KINDS)


def test_every_kind_of_fault_is_selected_for_the_tests() -> None:
    """In one of both selections; that a list or a watch is refused as gone, other tests try."""
    selected = {kind for _, kind, _, _ in (*REQUESTS, *EVENTS)}
    assert set(FaultKind) - selected == {FaultKind.GONE}
    assert {each.name for each, *_ in (*REQUESTS, *EVENTS)} == {each.name for each in SCENARIOS}


def test_every_request_gets_pairs_of_all_faults_in_turn() -> None:
    """One pair for each carrier at a point, and over the points each fault comes first and second."""
    point = Point("apply", "ConfigMap")
    found = [pair for number in range(100) for pair in pairs(point, number)]
    assert {len(pairs(point, number)) for number in range(100)} == {2}
    alone = set(applicable(point)) - KILLS
    assert {first for first, _ in found} == {second for _, second in found} == alone
    assert all((first in ON_THE_WIRE) == (second in ON_THE_WIRE) for first, second in found)
    assert pairs(Point("event", "ConfigMap"), 0) == pairs(Point("list", "ConfigMap"), 0) == ()


def test_a_stranger_under_a_childs_name_is_expected_to_stay_and_to_be_told() -> None:
    """Neither record nor claim, and a status that names it; the other children are as declared."""
    assert [each.name for each in SCENARIOS if each.has_stranger] == [STRANGER.name]
    names = [obj["metadata"]["name"] for _, obj in foreign_objects(STRANGER, TEAM)]
    assert names == ["bystander", "bystander", f"{NAME}-envoy"]
    assert "web-envoy" not in [obj["metadata"]["name"] for _, obj in foreign_objects(FIRST, TEAM)]
    assert len(RIVAL.rival_edits) == 3


def test_failures_stand_on_the_page_with_commit_and_machine() -> None:
    """And how many points there are, beside how many runs."""
    kinds = FaultKind.RESET, FaultKind.DELAY
    runs = [Run(FIRST, kind, Point("apply", "ConfigMap"), is_injected=True) for kind in kinds]
    runs[0].problems.append("a field is wrong")
    runs[1].settled_at = datetime(2026, 7, 2, tzinfo=UTC)
    text = page(runs, (), ["a complaint"], quiet_s=1, resync_interval_s=1, commit="abc123", machine="2 cores")
    assert "## Failures" in text
    assert "a field is wrong" in text
    assert "- a complaint" in text
    assert "1 points, 2 runs" in text
    assert "commit abc123, 2 cores" in " ".join(text.split())
    assert "## Failures" not in page(runs[1:], quiet_s=1, resync_interval_s=1)


def test_an_undisturbed_run_that_does_not_converge_fails(tmp_path: Path) -> None:
    """A run whose fault found nothing to strike is made again; what went wrong in it counts all the same."""
    nothing: Any = None
    kubeconfig = kubeconfig_in(tmp_path, {"server": "https://127.0.0.1:1"})
    campaign = Campaign(nothing, kubeconfig, nothing, tmp_path)
    point = Point("apply", "ConfigMap")
    fine, wrong, late, struck = (Run(FIRST, FaultKind.RESET, point, acted_mono=1.0) for _ in range(4))
    for each in (fine, wrong, struck):
        each.settled_at = datetime(2026, 7, 2, tzinfo=UTC)
    wrong.problems.append("a needless write")
    struck.is_injected, struck.problems = True, ["is told elsewhere"]
    campaign._runs = [fine, wrong, late, struck]
    told = campaign.undisturbed_failures()
    assert len(told) == 2
    assert "a needless write" in told[0]
    assert "it never settled" in told[1]
