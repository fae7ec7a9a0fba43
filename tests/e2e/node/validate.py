"""A container where no network namespace can be had: Envoy reads its configuration, says that it is good, and goes.

No mount namespace is needed either: mount paths are replaced by the volumes' real directories, in the arguments and
in a copy of the files. That is enough to validate, and would not be enough to run.
"""

import shutil
import subprocess
from pathlib import Path

import anyio

from operator_app.api.kinds import Object
from tests.e2e.node.container import ENVOY, envoy_arguments, mounts


async def configuration_error(
    container: Object, env: dict[str, str], paths: dict[str, Path], directory: Path
) -> str | None:
    """What Envoy has against the container's configuration; None if nothing. Raises UnsupportedError.

    ``directory`` is made anew for the copies.
    """
    replaced = _copied(mounts(container, paths), directory)
    words = [_moved(word, replaced) for word in envoy_arguments(container, env)]
    done = await anyio.run_process(
        [str(ENVOY), "--mode", "validate", *words],
        stdin=subprocess.DEVNULL,
        stderr=subprocess.STDOUT,
        check=False,
        env=env,
    )
    if done.returncode == 0:
        return None
    return done.stdout.decode("utf-8", "replace").strip()[-1000:]


def _copied(mounted: list[tuple[Path, str, bool]], directory: Path) -> list[tuple[str, str]]:
    """Pairs of mount path and the copy that stands for it, inner mount paths first, because they are replaced first."""
    shutil.rmtree(directory, ignore_errors=True)
    pairs = []
    for number, (source, mount_path, _) in enumerate(mounted):
        shutil.copytree(source, directory / str(number))
        pairs.append((mount_path.rstrip("/"), str(directory / str(number))))
    replaced = pairs[::-1]
    for file in directory.rglob("*"):
        if file.is_file():
            text = file.read_text("utf-8", "surrogateescape")
            file.chmod(0o600)
            file.write_text(_moved(text, replaced), "utf-8", "surrogateescape")
    return replaced


def _moved(text: str, replaced: list[tuple[str, str]]) -> str:
    for mount_path, real in replaced:
        text = text.replace(mount_path, real)
    return text
