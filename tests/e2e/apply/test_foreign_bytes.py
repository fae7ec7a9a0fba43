"""Random histories of a crowd: whatever others declare on our children is there for ever, and what is ours comes back.

A run in ``make test`` is small and always the same. ``FOREIGN_EXAMPLES=50`` (or ``make histories``) asks for that many
other histories, and shrinks one that fails; the steps that it prints can be added here as a test.
"""

import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from itertools import chain, count
from pathlib import Path
from typing import Final

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from operator_app.api.kinds import CHILD_KINDS, CONFIG_MAP, DEPLOYMENT, SERVICE, Kind, Object
from tests.e2e.apply.admission import BY_POLICY, BY_WEBHOOK, refusing_policy, refusing_webhook
from tests.e2e.apply.foreign_writers import (
    BYSTANDER,
    FIELDS,
    FLAGS,
    MANAGERS,
    METADATA,
    REPLACED,
    SPECS,
    Allow,
    Change,
    Crowd,
    Declare,
    Delete,
    Edit,
    Refuse,
    Replace,
    Restart,
    Step,
    WipeOwnership,
    Withdraw,
    parts_of,
    paths_of,
)
from tests.e2e.controlplane import Cluster, ControlPlane
from tests.e2e.kube import Kube
from tests.e2e.operator_process import OperatorProcess
from tests.e2e.proxies import OPERATOR_USER, leave_nothing

EXAMPLES: Final = int(os.environ.get("FOREIGN_EXAMPLES", "0"))
LARGE: Final = settings(max_examples=max(1, EXAMPLES), phases=(Phase.generate, Phase.shrink))
SMALL: Final = settings(max_examples=4, phases=(Phase.generate,), derandomize=True)
BOUNDED: Final = settings(
    LARGE if EXAMPLES else SMALL, deadline=None, database=None, suppress_health_check=list(HealthCheck)
)
STEPS: Final = 10
CROWDS: Final = 4
"""Proxies around which edits are made at the same time."""

kinds: Final = st.sampled_from(CHILD_KINDS)
numbers: Final = st.integers(0, 2)
managers: Final = st.sampled_from(MANAGERS)
appliers: Final = st.sampled_from(("platform", "helm", "before-first-apply"))
texts: Final = st.text(st.characters(exclude_categories=("Cs", "Cc")), max_size=12)

NewCrowd = Callable[[], Crowd]


@st.composite
def declarations(draw: st.DrawFn, kind: Kind) -> Declare:
    """Any fields that somebody may declare on a child of this kind."""
    what = draw(st.sampled_from(sorted(FIELDS[kind] | METADATA)))
    is_applied = draw(st.booleans())
    manager = draw(appliers if is_applied else managers)
    return Declare(kind, what, draw(numbers), draw(texts), manager, "apply" if is_applied else "strategic-merge")


def steps(hows: tuple[str, ...]) -> st.SearchStrategy[Step]:
    """Any step; declarations and changes are the most frequent ones."""
    declare = kinds.flatmap(declarations)
    change = kinds.flatmap(
        lambda kind: st.builds(Change, st.just(kind), st.sampled_from(paths_of(kind)), st.booleans(), managers)
    )
    replace = kinds.flatmap(
        lambda kind: st.builds(
            Replace,
            st.just(kind),
            st.sampled_from(sorted(REPLACED[kind])),
            managers,
            st.sampled_from(("", *parts_of(kind))),
        )
    )
    return st.one_of(
        declare,
        declare,
        change,
        replace,
        st.builds(Withdraw, kinds, appliers),
        st.builds(WipeOwnership, kinds),
        st.builds(Delete, kinds, st.sampled_from(("Background", "Foreground", "Orphan"))),
        st.builds(Refuse, kinds, st.sampled_from(hows)),
        st.builds(Allow, kinds),
        st.builds(Edit, st.sampled_from(sorted(SPECS))),
        st.builds(Restart),
    )


@pytest.fixture(scope="module")
def namespace(admin: Kube, control_plane: Cluster) -> Iterator[str]:  # noqa: ARG001  # the CRDs have to be there
    """One namespace for all proxies here, with objects of others that look like children."""
    name = "crowd"
    admin.create_namespace(name)
    for kind, body in bystanders().items():
        metadata = {"namespace": name, "name": BYSTANDER, "labels": {"app.kubernetes.io/name": "envoy"}}
        admin.create(kind, {"apiVersion": kind.api_version, "kind": kind.kind, "metadata": metadata} | body)
    yield name
    leave_nothing(admin, name)


def bystanders() -> dict[Kind, Object]:
    """Objects of others."""
    labels = {"app": BYSTANDER}
    pod = {"metadata": {"labels": labels}, "spec": {"containers": [{"name": "c", "image": "example.com/c:v1"}]}}
    return {
        CONFIG_MAP: {"data": {"keep": "me"}},
        SERVICE: {"spec": {"ports": [{"port": 1}]}},
        DEPLOYMENT: {"spec": {"replicas": 0, "selector": {"matchLabels": labels}, "template": pod}},
    }


@pytest.fixture(scope="module")
def hows(
    admin: Kube,
    control_plane: Cluster,
    operator_kubeconfig: Path,
    namespace: str,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[tuple[str, ...]]:
    """The ways in which writes can be refused here: an API server elsewhere can't ask a webhook of this process."""
    with ExitStack() as resources:
        operator = resources.enter_context(Kube(operator_kubeconfig))
        resources.enter_context(refusing_policy(admin, operator, namespace, OPERATOR_USER))
        if not isinstance(control_plane, ControlPlane):
            yield BY_POLICY
            return
        directory = tmp_path_factory.mktemp("webhook")
        resources.enter_context(refusing_webhook(admin, operator, namespace, OPERATOR_USER, directory))
        yield BY_POLICY + BY_WEBHOOK


@pytest.fixture(scope="module")
def new_crowd(
    admin: Kube, namespace: str, operator_kubeconfig: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[NewCrowd]:
    """Makes crowds around a proxy of their own, which one operator reconciles."""
    operator = OperatorProcess(operator_kubeconfig, tmp_path_factory.mktemp("operator") / "operator.log")
    operator.start(*FLAGS)
    numbers = count()
    yield lambda: Crowd(admin, namespace, f"web-{next(numbers)}", operator)
    operator.stop()
    assert not any(line.get("event") == "reconcile_crashed" for line in operator.log()), operator.log_text()


def play(new_crowd: NewCrowd, history: list[Step], *, unchecked: int = 0) -> tuple[tuple[Step, str], ...]:
    """Let everything happen in its order; returns which steps of others the API server refused, and its words.

    After the first ``unchecked`` steps nothing is looked at; the one after them shows what they have led to.
    """
    crowd = new_crowd()
    try:
        for number, step in enumerate(history):
            crowd.take(step, is_checked=number >= unchecked)
        return tuple(crowd.refused)
    finally:
        crowd.close()


def play_edits(new_crowd: NewCrowd, declared: list[Step], edits: list[list[Step]]) -> list[tuple[Step, str]]:
    """Let the edits happen one after the other, beside what is declared; returns what the API server refused.

    Several proxies share them: most of the time is the operator's, which waits longer before each repair in a row. The
    first one is looked at after each declaration too.
    """

    def share(first: int) -> tuple[tuple[Step, str], ...]:
        history = [*declared, *chain.from_iterable(edits[first::CROWDS])]
        return play(new_crowd, history, unchecked=0 if first == 0 else len(declared) - 1)

    with ThreadPoolExecutor(CROWDS) as threads:
        return [each for refused in threads.map(share, range(min(CROWDS, len(edits)))) for each in refused]


@pytest.mark.timeout(900 if not EXAMPLES else 120 * EXAMPLES)
def test_no_history_loses_a_foreign_byte(new_crowd: NewCrowd, hows: tuple[str, ...]) -> None:
    """After every step of every random history all foreign bytes are there, and ours are restored."""

    @BOUNDED
    @given(history=st.lists(steps(hows), min_size=4, max_size=STEPS))
    def any_history(history: list[Step]) -> None:
        play(new_crowd, history)

    any_history()


@pytest.mark.timeout(900)
def test_every_refusal_leaves_foreign_bytes_alone(new_crowd: NewCrowd, hows: tuple[str, ...]) -> None:
    """Whatever code a policy or a webhook refuses with: nothing of others goes, and ours comes back afterwards."""
    history: list[Step] = [
        Declare(SERVICE, "source ranges", 1, "", "platform", "apply"),
        Declare(SERVICE, "another port", 2, "", "helm", "strategic-merge"),
        Declare(SERVICE, "annotation", 0, '<é"\\', "helm", "apply"),
    ]
    for how in hows:
        history += [Refuse(SERVICE, how), Replace(SERVICE, "port renumbered", "kubectl-edit"), Allow(SERVICE)]
    assert play(new_crowd, history) == (), "each step has an effect"


@pytest.mark.timeout(900)
@pytest.mark.parametrize("kind", CHILD_KINDS, ids=str)
def test_every_field_of_others_survives_every_edit_of_ours(new_crowd: NewCrowd, kind: Kind) -> None:
    """All foreign fields at once beside each field of ours that is changed, removed or replaced in turn."""
    declared: list[Step] = [
        Declare(kind, what, 1, "<é\\", "platform", "apply") for what in sorted(FIELDS[kind] | METADATA)
    ]
    edits: list[list[Step]] = [
        [Change(kind, path, drop, "kubectl-edit") for drop in (False, True)] for path in paths_of(kind)
    ]
    edits += [[Replace(kind, what, "operator-app")] for what in sorted(REPLACED[kind])]
    refused = play_edits(new_crowd, declared, edits)
    assert [each for each in refused if not isinstance(each[0], Change)] == [], "all is declared, and all is replaced"


@pytest.mark.timeout(900)
@pytest.mark.parametrize("kind", [SERVICE, DEPLOYMENT], ids=str)
def test_what_a_refused_repair_restores_removes_nothing_around_it(new_crowd: NewCrowd, kind: Kind) -> None:
    """One edit excludes a field of ours, so that our apply is refused, and removes another part of ours, each in turn.

    The repair has to remove what excludes ours, and must not take the rest of what others declared for that.
    """
    declared: list[Step] = [
        Declare(kind, what, 1, "<é\\", "platform", "apply") for what in sorted(FIELDS[kind] | METADATA)
    ]
    replacements = sorted(REPLACED[kind])
    pairs = [(what, path) for path in parts_of(kind) for what in replacements]
    # A Deployment has too many; every 13th is a sample with each replacement. The random histories draw from all.
    every = 1 if kind == SERVICE else 13
    edits = [Replace(kind, what, "kubectl-edit", beside=path) for what, path in pairs[::every]]
    # What an edit has removed of others with a part of ours, they apply again with the declaration after it.
    refused = play_edits(new_crowd, declared, [[each, declared[-1]] for each in edits])
    assert [each for each in refused if isinstance(each[0], Declare)] == [], "all of it is declared"
    without_effect = [step for step, _ in refused]
    assert {what for (what, _), edit in zip(pairs[::every], edits, strict=True) if edit not in without_effect} == {
        *replacements
    }, "each replacement has taken a part of ours along, at least once"
