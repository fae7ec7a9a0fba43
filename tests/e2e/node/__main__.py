"""``python -m tests.e2e.node`` runs a control plane with a node until Ctrl-C or SIGTERM, then removes all of it."""

import signal
import sys
from types import FrameType

from tests.e2e.controlplane import BuildError, ControlPlane, StartError, ToolchainError
from tests.e2e.node import Node, NodeError, NodeUnavailableError


def main() -> int:
    """Run it; the exit code is 0 after an interrupt too, since that is how it is meant to end."""
    signal.signal(signal.SIGTERM, _interrupt)
    try:
        with ControlPlane(report=_report) as cluster, Node(cluster, _report) as node:
            print(f"KUBECONFIG={cluster.kubeconfig}", flush=True)
            print(" ".join(node.command("bash")), flush=True)
            while True:
                signal.pause()
    except (BuildError, NodeError, NodeUnavailableError, StartError, ToolchainError) as error:
        print(error, file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("node: stopped, its state removed", file=sys.stderr)
    return 0


def _interrupt(_signal: int, _frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def _report(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
