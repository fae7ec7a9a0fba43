"""The fault campaign can fail: claims are checked and mapped, every watched kind is tried, a missed fault fails."""

import json
import tempfile
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

import pytest

from operator_app.api.kinds import ENVOY_PROXY, HOSTNAME_CLAIM, LEASE, Key, Object
from operator_app.controller.scopes import INDEXES
from tests.e2e.controlplane import StartError
from tests.e2e.faults import __main__ as command
from tests.e2e.faults import checks, outside
from tests.e2e.faults.campaign import Run
from tests.e2e.faults.catalogue import starts
from tests.e2e.faults.injector import Injector
from tests.e2e.faults.observer import View
from tests.e2e.faults.plan import Asked, Fault, FaultKind, Plan, Point
from tests.e2e.faults.report import page
from tests.e2e.faults.scenarios import NAME, SCENARIOS, fresh_proxy, hostnames
from tests.e2e.operator_process import OPERATOR_NAMESPACE

FIRST, *_, DELETION, _RE_CREATION = SCENARIOS
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
    monkeypatch.setattr(outside, "everything", lambda *_: [])

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

    def experiment(directory: Path, _report: object) -> tuple[list[Run], list[str]]:
        if has_logs:
            (directory / "operator.log").write_text("{}")
        return [run], []

    monkeypatch.setattr(command, "_experiment", experiment)
    monkeypatch.setattr(command, "PAGE", tmp_path / "page.md")
    monkeypatch.setattr(outside, "everything", lambda *_: [])
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))

    command.main()

    left = list(tmp_path.glob(f"{command.DIRECTORY_PREFIX}*"))
    assert len(left) == int(is_kept)
    assert all(f"logs are in {each}" in capsys.readouterr().out for each in left)


def test_no_directory_stays_where_nothing_could_be_tried(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A control plane that does not start is an exit code of 1 and nothing else."""

    def experiment(_directory: Path, _report: object) -> tuple[list[Run], list[str]]:
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
