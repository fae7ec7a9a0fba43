"""``python -m tests.e2e.controlplane build`` builds the binary; ``up`` runs a control plane until interrupted."""

import argparse
import signal
import sys
from pathlib import Path
from types import FrameType

from tests.e2e.controlplane.build import BuildError, built_binary
from tests.e2e.controlplane.cluster import ControlPlane, StartError
from tests.e2e.controlplane.toolchain import ToolchainError


def main() -> int:
    """Run one command; the exit code is 0 after an interrupt too, since that is how ``up`` is meant to end."""
    parser = argparse.ArgumentParser(prog="python -m tests.e2e.controlplane", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("build", help="build the binary if it is not cached, and print its path")
    up = commands.add_parser("up", help="run a control plane until Ctrl-C or SIGTERM, then remove all of it")
    up.add_argument(
        "--crds", type=Path, nargs="*", default=[], metavar="FILE", help="CustomResourceDefinitions to apply"
    )
    arguments = parser.parse_args()
    try:
        if arguments.command == "build":
            print(built_binary(_report))
        else:
            _run(arguments.crds)
    except (BuildError, StartError, ToolchainError) as error:
        print(error, file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("control plane: stopped, its state removed", file=sys.stderr)
    return 0


def _run(crds: list[Path]) -> None:
    signal.signal(signal.SIGTERM, _interrupt)
    with ControlPlane(crds=crds, report=_report) as control_plane:
        print(f"KUBECONFIG={control_plane.kubeconfig}", flush=True)
        while True:
            signal.pause()


def _interrupt(_signal: int, _frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def _report(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
