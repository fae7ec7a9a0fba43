"""Envoy accepts every rendered configuration. No Kubernetes is needed."""

import json
import subprocess
from pathlib import Path

import pytest

from operator_app.envoy import drain
from tests.e2e.envoy.envoy_process import DEADLINE_S, ENVOY, NEEDS_ENVOY
from tests.unit.envoy import cases
from tests.unit.envoy.parts import static_configuration

pytestmark = NEEDS_ENVOY

ACCEPTED = cases.accepted()


def validated(config: str, directory: Path) -> subprocess.CompletedProcess[str]:
    """The result of Envoy's ``--mode validate`` for a configuration."""
    path = directory / "envoy.json"
    path.write_text(config)
    return subprocess.run(
        [str(ENVOY), "--mode", "validate", "-c", path, "-l", "warning"],
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )


@pytest.mark.parametrize("name", ACCEPTED)
def test_envoy_accepts_every_spec(name: str, tmp_path: Path) -> None:
    """Every kind of listener with every kind of backend is valid, without a warning or a deprecated field."""
    result = validated(json.dumps(static_configuration(ACCEPTED[name])), tmp_path)
    assert result.returncode == 0, result.stdout[-500:] + result.stderr[-500:]
    assert not result.stderr


def test_envoy_accepts_the_drain_helper(tmp_path: Path) -> None:
    """The configuration of the pre-stop hook is valid and has no deprecated field."""
    command = drain.pre_stop()["exec"]["command"]
    result = validated(command[command.index("--config-yaml") + 1], tmp_path)
    assert result.returncode == 0, result.stdout[-500:] + result.stderr[-500:]
    assert "deprecat" not in result.stderr.lower()
