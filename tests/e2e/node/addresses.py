"""The addresses of a node: the same for every node, because each has a network namespace of its own."""

from typing import Final

from tests.e2e.controlplane.components import NODE_ADDRESS as NODE_ADDRESS  # noqa: PLC0414  # in its certificate, too

NODE_NAME: Final = "node-0"
POD_NETWORK: Final = "10.244.0.0/22"
API_SERVER_PORT: Final = 6443
"""At ``NODE_ADDRESS``, inside the node's network; outside it is another one, on loopback."""
