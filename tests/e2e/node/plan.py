"""What the keeper and the first process of a node are told, as a file in JSON: they are processes of their own."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Self

from tests.e2e.node.addresses import FIRST, Member
from tests.e2e.node.configuration import Files


@dataclass(frozen=True, slots=True)
class Plan:
    """The nodes of one run.

    ``directory`` has their configuration (``configuration.Files``), ``logs`` takes their logs, ``programs`` are those
    of the module ``go``, ``kubernetes`` is the binary of kubelet and kube-proxy, ``images`` are archives to import,
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
    nodes: int = 1

    @property
    def members(self) -> tuple[Member, ...]:
        """All nodes, the first one first."""
        return tuple(map(Member, range(self.nodes)))

    def files(self, member: Member) -> Files:
        """The configuration of one of them."""
        first = Files(Path(self.directory))
        return first.of(member) if member != FIRST else first

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
