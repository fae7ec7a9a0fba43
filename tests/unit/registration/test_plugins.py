"""Registries as plugins: how they are found, opened and closed, and what is reported when that fails."""

import sys
from pathlib import Path

import pytest

from operator_app.errors import ConfigurationError
from operator_app.registration.identity import Installation
from operator_app.registration.ledger import IN_CLUSTER
from operator_app.registration.plugins import open_registries
from operator_app.registration.registrar import Registries
from operator_app.settings import Settings

CLUSTER_UID = "0f0f0f0f-1111-2222-3333-444444444444"


async def cluster_uid() -> str:
    """The identity of the cluster."""
    return CLUSTER_UID


async def unread() -> str:
    """Fails the test: nothing outside needs the cluster's identity."""
    raise AssertionError


def test_the_problem_of_an_unknown_registry_lists_the_known_ones() -> None:
    """The message says what to write instead."""
    registries = Registries({})
    assert registries.unknown(IN_CLUSTER) is None
    problem = registries.unknown("dsn")
    assert problem is not None
    assert problem.needs_user_action
    assert "dsn" in problem.message
    assert IN_CLUSTER in problem.message


PACKAGE = """
from contextlib import asynccontextmanager

from operator_app.errors import ConfigurationError

not_a_factory = 1
opened = []

@asynccontextmanager
async def good(settings, installation):
    opened.append((settings.operator_id, installation))
    yield "a registry"
    opened.clear()

@asynccontextmanager
async def refusing(settings, installation):
    raise ConfigurationError("set OUR_URL")
    yield

def crashing(settings, installation):
    raise RuntimeError("something\\nunexpected")
"""


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Third-party packages with entry points, on ``sys.path``."""
    (tmp_path / "their_registries.py").write_text(PACKAGE)
    for version, points in (
        (
            "a",
            "good = their_registries:good\nrefusing = their_registries:refusing\nodd = their_registries:not_a_factory",
        ),
        (
            "b",
            "crashing = their_registries:crashing\nmissing = their_registries:nothing\ntwice = their_registries:good",
        ),
        ("c", "twice = their_registries:refusing\npowerdns = their_registries:good\nabsent = no_such_package:open"),
    ):
        info = tmp_path / f"their_{version}-1.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: their-{version}\nVersion: 1\n")
        (info / "entry_points.txt").write_text(f"[operator_app.registries]\n{points}\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "their_registries", raising=False)
    return tmp_path


@pytest.mark.anyio
@pytest.mark.usefixtures("installed")
async def test_a_registry_is_opened_with_the_settings_and_closed_at_the_end() -> None:
    """The factory is called once with the settings, and its context lasts as long as the operator."""
    async with open_registries(Settings(registry="good", operator_id="mine"), cluster_uid) as registries:
        assert registries.default == "good"
        assert list(registries.outside) == ["good"]
        opened = sys.modules["their_registries"].opened
        assert opened == [("mine", Installation.of(CLUSTER_UID, "mine"))]
        assert registries.installation == Installation.of(CLUSTER_UID, "mine")
    assert opened == []


@pytest.mark.anyio
async def test_the_default_registry_needs_no_plugin() -> None:
    """``in-cluster`` is the ledger itself: no entry point is needed."""
    async with open_registries(Settings(), unread) as registries:
        assert registries == Registries({}, IN_CLUSTER)


@pytest.mark.anyio
@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("elsewhere", "no registry elsewhere is installed; there are: .*good.*in-cluster"),
        ("absent", "absent can't be loaded from no_such_package:open: No module named"),
        ("missing", "missing can't be loaded from their_registries:nothing"),
        ("odd", "odd is no factory"),
        ("twice", "twice is installed twice, as their_registries:good and their_registries:refusing; uninstall one"),
        ("powerdns", "powerdns is installed twice"),
        ("refusing", "^set OUR_URL$"),
        ("crashing", "the registry crashing does not open: something unexpected"),
    ],
)
async def test_a_registry_that_can_not_be_opened_is_reported_in_one_sentence(name: str, sentence: str) -> None:
    """Missing, broken, ambiguous or refusing: the operator does not start, and the error says why."""
    with pytest.raises(ConfigurationError, match=sentence):
        async with open_registries(Settings(registries=(name,), operator_id="mine"), cluster_uid):
            pass


@pytest.mark.anyio
@pytest.mark.usefixtures("installed")
async def test_a_registry_outside_needs_an_id_that_the_installer_chose() -> None:
    """Without an id nothing is opened and the cluster is not asked; the sentence says what to set."""
    with pytest.raises(ConfigurationError, match=r"needs an id.*OPERATOR_APP_OPERATOR_ID \(--operator-id\)"):
        async with open_registries(Settings(registry="good"), unread):
            pass
