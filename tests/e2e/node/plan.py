"""What the keeper and the first process of a node are told, as a file in JSON: they are processes of their own."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Self


@dataclass(frozen=True, slots=True)
class Plan:
    """One node.

    ``directory`` has its configuration (``configuration.Files``), ``logs`` takes its logs, ``programs`` are those of
    the module ``go``, ``kubernetes`` is the binary of kubelet and kube-proxy, ``images`` are archives to import,
    ``api_server_port`` is the API server's on loopback, and ``proxy_socket`` is where it expects the way inwards.
    """

    directory: str
    logs: str
    programs: str
    kubernetes: str
    images: list[str]
    client_ca: str
    api_server_port: int
    proxy_socket: str

    @property
    def file(self) -> Path:
        """Where it is written to."""
        return Path(self.directory) / "plan.json"

    def write(self) -> None:
        """Write it for the other processes."""
        self.file.write_text(json.dumps(asdict(self)), encoding="utf-8")

    @classmethod
    def read(cls, file: Path) -> Self:
        """What was written."""
        return cls(**json.loads(file.read_text(encoding="utf-8")))
