"""NetworkPolicies of a node, enforced as long as a block lasts: kube-router's controller of them, in its network.

The controller writes iptables rules and sets of addresses (ipset) of the node's network namespace, from the Pods,
Namespaces and NetworkPolicies of the API server. What it forbids it rejects, so that a client is refused at once and
does not wait. As every implementation has to, it lets the node itself reach its Pods, whatever a policy says
(https://kubernetes.io/docs/concepts/services-networking/network-policies/); whoever tests one connects from a Pod
(``Node.pod_network``). A change is in force some tenths of a second after it was stored.
"""

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from tests.e2e.controlplane.build import GoModule, Report, built_programs
from tests.e2e.controlplane.components import SERVICE_NETWORK
from tests.e2e.node import packages
from tests.e2e.node.node import Node, NodeError

PROGRAM: Final = GoModule(
    name="policies",
    directory=Path(__file__).parent / "policies",
    programs=(".",),
    contents="kube-router's controller of NetworkPolicies",
)
STOP_TIMEOUT_S: Final = 30.0
LOG_TAIL_LINES: Final = 15
PATH: Final = f"{os.environ.get('PATH', os.defpath)}:/usr/sbin:/sbin"
NEEDED: Final = ("iptables", "ipset")
"""Programs, and the Debian packages of the same names."""

_TRIED: Final = (
    "ipset create tried hash:ip",
    "iptables -A FORWARD -m set --match-set tried src -m conntrack --ctstate NEW -j REJECT",
    "iptables -A FORWARD -m physdev --physdev-is-bridged -m addrtype --src-type LOCAL -m limit -j NFLOG",
)
"""What the controller uses that a kernel may lack."""


class PoliciesUnavailableError(RuntimeError):
    """No policies can be enforced on this machine; the message is one sentence that says what is missing."""

    def __init__(self, why: str) -> None:
        super().__init__(f"NetworkPolicies can't be enforced here: {why}")


@contextmanager
def enforced(node: Node, kubeconfig: Path, log: Path, report: Report = lambda _line: None) -> Iterator[None]:
    """In this block, policies decide what the Pods of ``node`` may do; afterwards no rule and no set of it is left.

    ``kubeconfig`` is of somebody who may read Pods, Namespaces, Nodes and NetworkPolicies. Raises
    ``PoliciesUnavailableError`` where this machine can't do it, ``NodeError`` where the controller does not come up or
    does not end in order, and what ``built_programs`` raises.
    """
    ensure(report)
    program = built_programs(PROGRAM, report) / "policies"
    inside = str(node.kubeconfig_inside(kubeconfig))
    with (
        log.open("wb") as errors,
        subprocess.Popen(
            node.command(str(program), inside, node.name, SERVICE_NETWORK),
            env=os.environ | {"PATH": PATH},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            # Ctrl-C at a terminal is for the tests, which then end this in their own order.
            start_new_session=True,
        ) as process,
    ):
        assert process.stdout is not None
        assert process.stdin is not None
        if not process.stdout.readline():
            raise NodeError("\n".join(["NetworkPolicies are not enforced:", *_tail(log)]))
        try:
            yield
        finally:
            process.stdin.close()
            try:
                code = process.wait(STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                process.kill()
                raise
        if code != 0:
            raise NodeError("\n".join([f"the controller of NetworkPolicies ended with {code}:", *_tail(log)]))


def left_behind(node: Node) -> list[str]:
    """Rules and sets of the controller that are in the node's network now."""
    rules, sets = (
        subprocess.run(
            node.command(*command),
            env=os.environ | {"PATH": PATH},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=True,
        ).stdout.splitlines()
        for command in (("iptables-save", "-t", "filter"), ("ipset", "list", "-name"))
    )
    return [each for each in (*rules, *sets) if "KUBE-" in each]


def ensure(report: Report) -> None:
    """Install what is missing. Raises ``PoliciesUnavailableError`` where that can't be done, or would not help."""
    try:
        packages.install(_missing, lambda line: report(f"policies: {line}"))
    except packages.PackagesError as error:
        raise PoliciesUnavailableError(str(error)) from error
    tried = subprocess.run(
        ["unshare", "--net", "sh", "-ec", "\n".join(_TRIED)],
        env=os.environ | {"PATH": PATH},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    if tried.returncode != 0:
        raise PoliciesUnavailableError(tried.stderr.strip())


def _missing() -> list[str]:
    return [name for name in NEEDED if shutil.which(name, path=PATH) is None]


def _tail(log: Path) -> list[str]:
    return log.read_text(encoding="utf-8", errors="replace").splitlines()[-LOG_TAIL_LINES:]
