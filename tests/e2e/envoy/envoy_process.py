"""Envoy as a process on loopback, with HTTP backends.

The ports of a configuration are replaced by free ones, the mount and the sockets by those of the test; nothing else of
it is changed.
"""

import json
import re
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from http.client import HTTPConnection, HTTPException
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from socketserver import BaseServer
from typing import Any, Self, TypeVar, cast

import pytest

from operator_app.api.models import EnvoyProxySpec
from operator_app.envoy import internal
from operator_app.envoy.files import Files, rendered
from operator_app.envoy.messages import CONFIG_DIRECTORY

ENVOY = shutil.which("envoy", path=str(Path(sys.executable).parent)) or shutil.which("envoy")

NEEDS_ENVOY = pytest.mark.skipif(ENVOY is None, reason="no envoy beside the interpreter or on PATH")

T = TypeVar("T")

DEADLINE_S = 60.0


def eventually(probe: Callable[[], T | None], what: str) -> T:
    """The first result of ``probe`` that is not ``None``; fails after ``DEADLINE_S`` seconds."""
    deadline = time.monotonic() + DEADLINE_S
    while (result := probe()) is None:
        assert time.monotonic() < deadline, f"not within {DEADLINE_S} s: {what}"
        threading.Event().wait(0.02)
    return result


class _Unix(HTTPConnection):
    """A connection to an abstract Unix socket, whose name is written with a leading ``@``."""

    def connect(self) -> None:
        """Open the socket."""
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(DEADLINE_S)
        self.sock.connect("\0" + self.host.removeprefix("@"))


class Mount:
    """A directory that is filled as a kubelet fills that of a ConfigMap: all files at once, by renaming a link."""

    def __init__(self, directory: Path) -> None:
        self.path = directory
        directory.mkdir()
        self._versions = 0

    @classmethod
    def existing(cls, directory: Path) -> Self:
        """A mount that is there, to be filled anew."""
        mount = cls.__new__(cls)
        mount.path = directory
        mount._versions = len(list(directory.iterdir()))
        return mount

    def swap(self, texts: Mapping[str, str]) -> None:
        """Replace all files."""
        self._versions += 1
        data = self.path / f"..{self._versions}"
        data.mkdir()
        for name, text in texts.items():
            (data / name).write_text(text)
        new = self.path / "..data_tmp"
        new.symlink_to(data.name)
        new.rename(self.path / "..data")
        for name in texts:
            if not (self.path / name).is_symlink():
                (self.path / name).symlink_to(f"..data/{name}")


class EnvoyProcess:
    """A running Envoy. ``port`` returns the real port of a listener of the spec or of ``internal/readiness``.

    ``instead`` are files that it is started with in place of those of ``spec``, ``user`` is the user id that it gets,
    and ``program`` the file to execute, which that user may.
    """

    def __init__(
        self,
        spec: EnvoyProxySpec,
        directory: Path,
        instead: Mapping[str, str] | None = None,
        user: int | None = None,
        program: Path | None = None,
    ) -> None:
        self._sockets = f"@{directory}/"
        self.admin_socket = self._local(internal.ADMIN_SOCKET)
        self.mount = Mount(directory / "mount")
        self.files = rendered(spec)
        self.mount.swap(self.local_texts(self.files) | dict(instead or {}))
        self._log = (directory / "log").open("wb")
        self.log_path = directory / "log"
        command = [str(program or ENVOY), "--config-path", str(self.mount.path / self.files.bootstrap_file)]
        command += ["--service-cluster", "tests/proxy", "--service-node", "local", "--reject-unknown-dynamic-fields"]
        self.process = subprocess.Popen(
            [*command, "--disable-hot-restart", "--concurrency", "2"], stdout=self._log, stderr=self._log, user=user
        )

    def __enter__(self) -> Self:
        eventually(self._is_live, "Envoy to be live")
        self.find_ports()
        return self

    def __exit__(self, *_: object) -> None:
        self.process.terminate()
        self.process.wait(DEADLINE_S)
        self._log.close()

    def local_texts(self, files: Files) -> dict[str, str]:
        """The texts of ``files`` with this Envoy's mount and sockets, and with free ports in place of fixed ones."""
        return {name: self._local(text) for name, text in files.texts.items()}

    def reload(self, spec: EnvoyProxySpec) -> None:
        """Put the files of another spec into the mount."""
        self.files = rendered(spec)
        self.mount.swap(self.local_texts(self.files))

    def _local(self, text: str) -> str:
        text = text.replace(f'"{CONFIG_DIRECTORY}', f'"{self.mount.path}') if hasattr(self, "mount") else text
        text = text.replace("@operator-app/", self._sockets)
        bound = r'("address": ?"(?:0\.0\.0\.0|::)",\s*(?:"ipv4_compat": ?true,\s*)?"port_value": ?)\d+'
        return re.sub(bound, lambda found: f"{found[1]}0", text)

    def find_ports(self) -> None:
        """Ask Envoy at which ports it listens."""
        listeners = json.loads(self.admin("/listeners?format=json"))["listener_statuses"]
        self._ports = {each["name"]: each["local_address"]["socket_address"]["port_value"] for each in listeners}

    def _is_live(self) -> bool | None:
        assert self.process.poll() is None, self.log_path.read_text()
        return True if self.admin("/ready") == "LIVE\n" else None

    def loaded(self) -> dict[str, str]:
        """The versions that this Envoy has loaded, by the prefix of the statistics about them."""
        stats = dict(line.split(": ", 1) for line in self.admin("/stats?filter=version_text$").splitlines())
        return {name.removesuffix(".version_text"): value.strip('"') for name, value in stats.items()}

    def has_loaded(self) -> bool | None:
        """Whether the latest files are loaded; ``None`` if not."""
        return True if self.loaded() == self.files.versions else None

    def admin(self, path: str) -> str:
        """The body that the admin interface returns for a GET, empty if the request fails."""
        try:
            with closing(_Unix(self.admin_socket)) as connection:
                connection.request("GET", path, headers={"Host": "admin"})
                return connection.getresponse().read().decode()
        except (OSError, HTTPException):
            return ""

    def port(self, name: str) -> int:
        """The port of the listener called ``name``."""
        return int(self._ports.get(f"listener/{name}", self._ports.get(name, 0)))

    def get(self, listener: str, path: str, host: str = "any.test", **headers: str) -> tuple[int, str, dict[str, str]]:
        """Status, body and headers of one request on a new connection. Underscores in header names are kept."""
        with closing(HTTPConnection("127.0.0.1", self.port(listener), timeout=DEADLINE_S)) as connection:
            return exchange(connection, path, host, **headers)


def exchange(
    connection: HTTPConnection, path: str, host: str = "any.test", method: str = "GET", **headers: str
) -> tuple[int, str, dict[str, str]]:
    """Status, body and headers (names in lower case) of one request on ``connection``."""
    connection.putrequest(method, path, skip_host=True, skip_accept_encoding=True)
    for name, value in {"Host": host, **headers}.items():
        connection.putheader(name, value)
    connection.endheaders()
    answer = connection.getresponse()
    return answer.status, answer.read().decode(), {name.lower(): value for name, value in answer.getheaders()}


class _Answer(BaseHTTPRequestHandler):
    """Responds with the backend's name and the request's path, to ``/headers`` with the request's headers.

    The response to ``/slow`` waits for ``slow_released``.
    """

    protocol_version = "HTTP/1.1"
    wbufsize = -1  # One packet per response: two would wait for a delayed acknowledgement.

    def do_GET(self) -> None:
        backend = cast("Backend", self.server)
        if self.path == "/slow":
            backend.slow_started.set()
            backend.slow_released.wait(DEADLINE_S)
        headers = {name.lower(): value for name, value in self.headers.items()}
        body = (json.dumps(headers) if self.path == "/headers" else f"{backend.name} {self.path}").encode()
        self.send_response(200)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002  # the name is the base class's
        """Log nothing."""


class Backend(ThreadingHTTPServer):
    """An HTTP server whose slow request starts and ends under the test's control."""

    daemon_threads = True

    def __init__(self, name: str) -> None:
        super().__init__(("127.0.0.1", 0), _Answer)
        self.name = name
        self.slow_started, self.slow_released = threading.Event(), threading.Event()


@contextmanager
def backend(name: str) -> Iterator[Backend]:
    """An HTTP server on loopback that responds with its name."""
    with Backend(name) as server, served(server):
        yield server


@contextmanager
def served(server: BaseServer) -> Iterator[None]:
    """Serve in a thread of its own as long as the context lasts."""
    thread = threading.Thread(target=server.serve_forever, args=(0.02,))
    thread.start()
    try:
        yield
    finally:
        server.shutdown()
        thread.join()


def declared(server: Backend, host: str = "127.0.0.1") -> dict[str, Any]:
    """``server`` as a backend of a spec."""
    return {"name": server.name, "endpoints": [{"host": host, "port": server.server_port}]}


def running(spec: EnvoyProxySpec, directory: Path, instead: Mapping[str, str] | None = None) -> EnvoyProcess:
    """The Envoy that ``spec`` declares, as a context manager that starts and stops it."""
    return EnvoyProcess(spec, directory, instead)
