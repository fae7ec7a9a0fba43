"""The command line: ``python -m tests.e2e.node --kubeconfig FILE --name standin-0``.

Runs until SIGINT or SIGTERM, or with ``--lifeline`` until standard input ends, which it does when the parent dies.
"""

import argparse
import logging
import os
import signal
import sys
from pathlib import Path

import anyio
import httpx2
from anyio import CancelScope
from lightkube.core.exceptions import ConfigError

from tests.e2e.node.kubelet import serve


async def _stop_on_signal(scope: CancelScope) -> None:
    with anyio.open_signal_receiver(signal.SIGINT, signal.SIGTERM) as signals:
        async for _ in signals:
            scope.cancel()


async def _stop_on_end_of_input(scope: CancelScope) -> None:
    while True:
        await anyio.wait_readable(sys.stdin)
        if not os.read(sys.stdin.fileno(), 4096):
            scope.cancel()


async def _main(arguments: argparse.Namespace) -> None:
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(_stop_on_signal, tasks.cancel_scope)
        if arguments.lifeline:
            tasks.start_soon(_stop_on_end_of_input, tasks.cancel_scope)
        await serve(arguments.kubeconfig, arguments.name, validate_only=arguments.validate_only)


def main() -> None:
    """Parse the command line and be a node; what prevents that is said in one sentence, with exit code 1."""
    parser = argparse.ArgumentParser(prog="python -m tests.e2e.node", description=__doc__)
    parser.add_argument("--kubeconfig", type=Path, required=True)
    parser.add_argument("--name", default="standin-0")
    parser.add_argument("--validate-only", action="store_true", help="do not run Envoy even where that is possible")
    parser.add_argument("--lifeline", action="store_true", help="end when standard input does")
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="standin %(levelname)s %(name)s: %(message)s")
    logging.getLogger("httpx2").setLevel(logging.WARNING)
    try:
        anyio.run(_main, arguments)
    except* (httpx2.HTTPError, ConfigError, OSError, RuntimeError, ValueError) as errors:
        first = errors.exceptions[0]
        while isinstance(first, ExceptionGroup):
            first = first.exceptions[0]
        sys.exit(f"stand-in node {arguments.name}: {first}")


if __name__ == "__main__":
    main()
