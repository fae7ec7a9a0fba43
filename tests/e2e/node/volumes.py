"""A Pod's volumes as directories: ConfigMap, Secret, downward API and projected volumes, and ``emptyDir``.

Contents are swapped as the kubelet does it: files live in a fresh hidden directory, ``..data`` is a symlink that is
renamed over the old one, and the visible names are symlinks through ``..data``. A reader sees all old or all new
files. Service-account tokens are asked for once and not renewed; ``subPath`` and ``fsGroup`` are not supported.
"""

import shutil
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from operator_app.api.kinds import Object
from tests.e2e.node.references import MissingError, Source, UnsupportedError, field_value, source_data

TokenSource = Callable[[str | None, int], Awaitable[str]]
"""``(audience, expiration in seconds)`` to a service-account token bound to the Pod."""


@dataclass(frozen=True, slots=True)
class File:
    """What one file of a volume holds, and its permission bits."""

    data: bytes
    mode: int


class SwappedDirectory:
    """A directory whose files change all at once."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._files: dict[str, File] | None = None
        self._life = 0

    def write(self, files: dict[str, File]) -> None:
        """Make ``files`` (relative path to contents) the directory's contents; nothing happens if they are."""
        if files == self._files:
            return
        self.path.mkdir(parents=True, exist_ok=True)
        self._life += 1
        fresh = self.path / f"..life_{self._life}"
        for name, file in files.items():
            target = fresh / name
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(file.data)
            target.chmod(file.mode)
        fresh.mkdir(exist_ok=True)
        swap = self.path / "..data_tmp"
        swap.symlink_to(fresh.name)
        swap.rename(self.path / "..data")
        visible = {PurePosixPath(name).parts[0] for name in files}
        for name in visible:
            if not (self.path / name).is_symlink():
                (self.path / name).symlink_to(f"..data/{name}")
        for entry in self.path.iterdir():
            if not entry.name.startswith("..") and entry.name not in visible:
                entry.unlink()
        if self._life > 1:
            shutil.rmtree(self.path / f"..life_{self._life - 1}")
        self._files = files


class PodVolumes:
    """All volumes of one Pod below ``root``. ``paths`` maps a volume's name to its directory once it exists."""

    def __init__(self, root: Path, source: Source, token: TokenSource) -> None:
        self.paths: dict[str, Path] = {}
        self._root = root
        self._source = source
        self._token = token
        self._tokens: dict[tuple[str | None, int], str] = {}
        self._directories: dict[str, SwappedDirectory] = {}

    async def refresh(self, pod: Object, pod_ip: str, host_ip: str) -> None:
        """Bring every volume up to date with the objects it comes from.

        Raises MissingError if one that is not optional is absent (what is already mounted stays as it is), and
        UnsupportedError for a volume type that is not known here.
        """
        for volume in pod["spec"].get("volumes") or []:
            name = volume["name"]
            path = self._root / name
            if "emptyDir" in volume:
                path.mkdir(parents=True, exist_ok=True)
                path.chmod(0o777)
            else:
                files = await self._files(volume, pod, pod_ip, host_ip)
                self._directories.setdefault(name, SwappedDirectory(path)).write(files)
            self.paths[name] = path

    async def _files(self, volume: Object, pod: Object, pod_ip: str, host_ip: str) -> dict[str, File]:
        if projected := volume.get("projected"):
            mode = projected.get("defaultMode", 0o644)
            files: dict[str, File] = {}
            for part in projected.get("sources") or []:
                if token := part.get("serviceAccountToken"):
                    wanted = (token.get("audience"), token.get("expirationSeconds", 3600))
                    if wanted not in self._tokens:
                        self._tokens[wanted] = await self._token(*wanted)
                    files[token["path"]] = File(self._tokens[wanted].encode(), mode)
                else:
                    files |= self._object_files(part, pod, pod_ip, host_ip, mode)
            return files
        (details,) = (value for key, value in volume.items() if key != "name")
        return self._object_files(volume, pod, pod_ip, host_ip, details.get("defaultMode", 0o644))

    def _object_files(self, part: Object, pod: Object, pod_ip: str, host_ip: str, mode: int) -> dict[str, File]:
        if downward := part.get("downwardAPI"):
            return {
                item["path"]: File(
                    field_value(pod, item["fieldRef"]["fieldPath"], pod_ip, host_ip).encode(), item.get("mode", mode)
                )
                for item in downward.get("items") or []
            }
        for kind, field in (("ConfigMap", "configMap"), ("Secret", "secret")):
            if details := part.get(field):
                name = details.get("name") or details["secretName"]
                optional = bool(details.get("optional"))
                data = source_data(self._source, kind, name, optional=optional) or {}
                return dict(_selected(kind, name, data, details, mode, optional=optional))
        raise UnsupportedError(
            f"a volume of type {', '.join(part.keys() - {'name'})} is not known to the stand-in node"
        )


def _selected(
    kind: str, name: str, data: dict[str, bytes], details: dict[str, Any], mode: int, *, optional: bool
) -> Iterator[tuple[str, File]]:
    items = details.get("items")
    if items is None:
        yield from ((key, File(value, mode)) for key, value in data.items())
        return
    for item in items:
        if item["key"] in data:
            yield item["path"], File(data[item["key"]], item.get("mode", mode))
        elif not optional:
            raise MissingError(f"references non-existent key {item['key']} of {kind.lower()} {name}")
