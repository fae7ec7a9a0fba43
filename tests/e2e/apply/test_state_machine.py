"""Random histories on a real API server: any actions in any order end at the declared state.

A run in ``make test`` is small and always the same. ``STATE_MACHINE_EXAMPLES=50`` asks for that many other histories,
and shrinks one that fails; what it prints can be added here as a test.
"""

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule, run_state_machine_as_test

from operator_app.api.kinds import CHILD_KINDS, CONFIG_MAP, DEPLOYMENT, SERVICE, Kind
from tests.e2e.apply.cluster_model import EDITS, NAMES, SPECS, ClusterModel, Propagation
from tests.e2e.controlplane import AuditLog
from tests.e2e.kube import Kube

EXAMPLES: Final = int(os.environ.get("STATE_MACHINE_EXAMPLES", "0"))
LARGE: Final = settings(
    max_examples=max(1, EXAMPLES),
    stateful_step_count=25,
    phases=(Phase.explicit, Phase.generate, Phase.shrink),
)
SMALL: Final = settings(max_examples=2, stateful_step_count=12, phases=(Phase.generate,), derandomize=True)
BOUNDED: Final = settings(
    LARGE if EXAMPLES else SMALL, deadline=None, database=None, suppress_health_check=list(HealthCheck)
)

names: Final = st.sampled_from(NAMES)
kinds: Final = st.sampled_from(CHILD_KINDS)
operators: Final = st.sampled_from((0, 1))

NewModel = Callable[[], ClusterModel]


@pytest.fixture
def new_model(admin: Kube, audit: AuditLog, operator_kubeconfig: Path, tmp_path: Path) -> NewModel:
    """Makes models, which their users have to close."""
    return lambda: ClusterModel(admin, audit, operator_kubeconfig, tmp_path)


@pytest.fixture
def model(new_model: NewModel) -> Iterator[ClusterModel]:
    """One model, for a history that the test writes out."""
    model = new_model()
    yield model
    model.close()


class Histories(RuleBasedStateMachine):
    """The actions that may happen next. ``new_model`` is set by the test."""

    new_model: NewModel

    def __init__(self) -> None:
        super().__init__()
        self.model = type(self).new_model()
        self.namespaces_left = 0

    @initialize(spec=st.sampled_from(sorted(SPECS)))
    def begin(self, spec: str) -> None:
        """A proxy and an operator exist from the beginning."""
        self.model.start(0)
        self.model.declare(NAMES[0], spec)

    @rule(name=names, spec=st.sampled_from(sorted(SPECS)))
    def declare(self, name: str, spec: str) -> None:
        """A user creates or edits a proxy."""
        self.model.declare(name, spec)

    @rule(name=names, propagation=st.sampled_from(("Background", "Foreground")))
    def delete(self, name: str, propagation: Propagation) -> None:
        """A user deletes a proxy."""
        self.model.delete(name, propagation)

    @rule(name=names, what=st.sampled_from(sorted(EDITS)))
    def edit(self, name: str, what: str) -> None:
        """Another writer edits a child."""
        self.model.edit(name, what)

    @rule(name=names, kind=kinds)
    def annotate(self, name: str, kind: Kind) -> None:
        """Another writer puts labels and annotations on a child and its proxy."""
        self.model.annotate(name, kind)

    @rule(name=names, kind=kinds)
    def delete_child(self, name: str, kind: Kind) -> None:
        """Another writer deletes a child."""
        self.model.delete_child(name, kind)

    @rule(name=names, kind=kinds, is_labelled=st.booleans())
    def create_foreign(self, name: str, kind: Kind, is_labelled: bool) -> None:  # noqa: FBT001  # hypothesis gives keywords
        """Another writer creates an object under a child's name."""
        self.model.create_foreign(name, kind, is_labelled=is_labelled)

    @rule(name=names, kind=kinds)
    def delete_foreign(self, name: str, kind: Kind) -> None:
        """That object is deleted."""
        self.model.delete_foreign(name, kind)

    @rule(which=operators)
    def start(self, which: int) -> None:
        """An operator starts, perhaps beside another one."""
        self.model.start(which)

    @rule(which=operators)
    def kill(self, which: int) -> None:
        """An operator is killed."""
        self.model.kill(which)

    @rule(which=operators)
    def stop(self, which: int) -> None:
        """An operator is stopped with SIGTERM."""
        self.model.stop(which)

    @precondition(lambda self: self.namespaces_left == 0)
    @rule()
    def replace_namespace(self) -> None:
        """The namespace is deleted, at most once: it takes long."""
        self.namespaces_left += 1
        self.model.replace_namespace()

    @rule()
    def check_settled(self) -> None:
        """Nothing else happens until the cluster is as expected."""
        self.model.check_settled()

    def teardown(self) -> None:
        """Check the final state."""
        try:
            self.model.check_settled()
        finally:
            self.model.close()


@pytest.mark.timeout(900 if not EXAMPLES else 120 * EXAMPLES)
def test_any_history_ends_at_the_declared_state(new_model: NewModel) -> None:
    """Random interleavings of users, other writers, crashes and two operators end as declared, and without writes."""

    def machine() -> RuleBasedStateMachine:
        return Histories()

    Histories.new_model = staticmethod(new_model)
    factory: Any = machine
    run_state_machine_as_test(factory, settings=BOUNDED)


def test_a_foreign_object_between_two_incarnations_is_waited_out(model: ClusterModel) -> None:
    """A foreign object under a child's name stays as it is, and the child is created once that object is deleted."""
    model.start(0)
    model.declare("a", "plain")
    model.delete("a", "Foreground")
    model.check_settled()
    for kind in (CONFIG_MAP, SERVICE):
        model.create_foreign("a", kind, is_labelled=kind is SERVICE)
    model.declare("a", "dressed")
    model.check_settled()
    model.delete_foreign("a", SERVICE)
    model.delete_foreign("a", CONFIG_MAP)
    model.check_settled()


def test_two_operators_at_once_make_nothing_twice_and_settle(model: ClusterModel) -> None:
    """Two replicas at the same time: one of everything, foreign objects untouched, and no write in the end."""
    model.start(0)
    model.start(1)
    model.create_foreign("b", DEPLOYMENT)
    for name in ("a", "b"):
        model.declare(name, "two ports")
    model.check_settled()
    for what in ("selector", "image", "data", "label gone"):
        model.edit("a", what)
    model.delete_child("a", SERVICE)
    model.kill(0)
    model.declare("a", "rerouted")
    model.start(0)
    model.delete("b")
    model.check_settled()
    model.delete_foreign("b", DEPLOYMENT)
    model.declare("b", "plain")
    model.check_settled()


def test_everything_at_once_while_no_operator_runs(model: ClusterModel) -> None:
    """Edits, deletions and foreign objects while no operator runs: one start repairs everything."""
    model.start(0)
    for name in ("a", "b"):
        model.declare(name, "dressed")
    model.check_settled()
    model.kill(0)
    model.annotate("a", SERVICE)
    model.annotate("a", DEPLOYMENT)
    for what in EDITS:
        model.edit("a", what)
    model.declare("a", "two ports")
    for kind in CHILD_KINDS:
        model.delete_child("b", kind)
    model.create_foreign("b", CONFIG_MAP, is_labelled=True)
    model.check_settled()
    model.delete_foreign("b", CONFIG_MAP)
    model.replace_namespace()
    model.declare("a", "stopped")
    model.check_settled()
