"""Random histories against a real API server: whatever happens in whatever order, it ends at the declared state.

A run in ``make test`` is small and always the same. ``STATE_MACHINE_EXAMPLES=50`` asks for that many other histories,
and shrinks one that fails; what it prints becomes a plain test here.
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
from tests.e2e.apply.cluster_model import EDITS, NAMES, SPECS, Propagation, World
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

NewWorld = Callable[[], World]


@pytest.fixture
def new_world(admin: Kube, audit: AuditLog, operator_kubeconfig: Path, tmp_path: Path) -> NewWorld:
    """Makes worlds, which their users have to end."""
    return lambda: World(admin, audit, operator_kubeconfig, tmp_path)


@pytest.fixture
def world(new_world: NewWorld) -> Iterator[World]:
    """One world, for a history that is written down."""
    world = new_world()
    yield world
    world.end()


class Histories(RuleBasedStateMachine):
    """What may happen next. ``new_world`` is set by the test."""

    new_world: NewWorld

    def __init__(self) -> None:
        super().__init__()
        self.world = type(self).new_world()
        self.moves = 0

    @initialize(spec=st.sampled_from(sorted(SPECS)))
    def begin(self, spec: str) -> None:
        """A proxy and an operator, so that there is something to disturb."""
        self.world.start(0)
        self.world.declare(NAMES[0], spec)

    @rule(name=names, spec=st.sampled_from(sorted(SPECS)))
    def declare(self, name: str, spec: str) -> None:
        """A user creates or edits a proxy."""
        self.world.declare(name, spec)

    @rule(name=names, propagation=st.sampled_from(("Background", "Foreground")))
    def withdraw(self, name: str, propagation: Propagation) -> None:
        """A user deletes a proxy."""
        self.world.withdraw(name, propagation)

    @rule(name=names, what=st.sampled_from(sorted(EDITS)))
    def edit(self, name: str, what: str) -> None:
        """Somebody edits a child."""
        self.world.edit(name, what)

    @rule(name=names, kind=kinds)
    def mark(self, name: str, kind: Kind) -> None:
        """Somebody puts labels and annotations on things."""
        self.world.mark(name, kind)

    @rule(name=names, kind=kinds)
    def remove(self, name: str, kind: Kind) -> None:
        """Somebody deletes a child."""
        self.world.remove(name, kind)

    @rule(name=names, kind=kinds, is_labelled=st.booleans())
    def intrude(self, name: str, kind: Kind, is_labelled: bool) -> None:  # noqa: FBT001  # hypothesis gives keywords
        """A stranger takes a child's name."""
        self.world.intrude(name, kind, is_labelled=is_labelled)

    @rule(name=names, kind=kinds)
    def retreat(self, name: str, kind: Kind) -> None:
        """The stranger leaves."""
        self.world.retreat(name, kind)

    @rule(which=operators)
    def start(self, which: int) -> None:
        """An operator starts, perhaps beside another one."""
        self.world.start(which)

    @rule(which=operators)
    def kill(self, which: int) -> None:
        """An operator dies at once."""
        self.world.kill(which)

    @rule(which=operators)
    def stop(self, which: int) -> None:
        """An operator is stopped."""
        self.world.stop(which)

    @precondition(lambda self: self.moves == 0)
    @rule()
    def leave(self) -> None:
        """The namespace is deleted, at most once: it takes long."""
        self.moves += 1
        self.world.leave()

    @rule()
    def rest(self) -> None:
        """Everybody waits, and everything must be right."""
        self.world.rest()

    def teardown(self) -> None:
        """The last rest."""
        try:
            self.world.rest()
        finally:
            self.world.end()


@pytest.mark.timeout(240 if not EXAMPLES else 120 * EXAMPLES)
def test_whatever_happens_it_ends_at_the_declared_state(new_world: NewWorld) -> None:
    """Random interleavings of users, editors, strangers, crashes and two operators end as declared, and quietly."""

    def machine() -> RuleBasedStateMachine:
        return Histories()

    Histories.new_world = staticmethod(new_world)
    factory: Any = machine
    run_state_machine_as_test(factory, settings=BOUNDED)


def test_a_stranger_that_comes_between_two_lives_and_leaves(world: World) -> None:
    """A name that a stranger takes while the proxy is away is left alone, and used again once the stranger has left."""
    world.start(0)
    world.declare("a", "plain")
    world.withdraw("a", "Foreground")
    world.rest()
    for kind in (CONFIG_MAP, SERVICE):
        world.intrude("a", kind, is_labelled=kind is SERVICE)
    world.declare("a", "dressed")
    world.rest()
    world.retreat("a", SERVICE)
    world.retreat("a", CONFIG_MAP)
    world.rest()


def test_two_operators_at_once_make_nothing_twice_and_come_to_rest(world: World) -> None:
    """Two operators without a leader: one of everything, strangers untouched, and silence in the end."""
    world.start(0)
    world.start(1)
    world.intrude("b", DEPLOYMENT)
    for name in ("a", "b"):
        world.declare(name, "two ports")
    world.rest()
    for what in ("selector", "image", "data", "label gone"):
        world.edit("a", what)
    world.remove("a", SERVICE)
    world.kill(0)
    world.declare("a", "rerouted")
    world.start(0)
    world.withdraw("b")
    world.rest()
    world.retreat("b", DEPLOYMENT)
    world.declare("b", "plain")
    world.rest()


def test_everything_at_once_while_nobody_looks(world: World) -> None:
    """Edits, deletions, strangers and a new life, all while no operator runs: one start sets it right."""
    world.start(0)
    for name in ("a", "b"):
        world.declare(name, "dressed")
    world.rest()
    world.kill(0)
    world.mark("a", SERVICE)
    world.mark("a", DEPLOYMENT)
    for what in EDITS:
        world.edit("a", what)
    world.declare("a", "two ports")
    for kind in CHILD_KINDS:
        world.remove("b", kind)
    world.intrude("b", CONFIG_MAP, is_labelled=True)
    world.rest()
    world.retreat("b", CONFIG_MAP)
    world.leave()
    world.declare("a", "stopped")
    world.rest()
