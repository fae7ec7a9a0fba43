"""Clients of the sample's Service while its Pods are replaced in every way: no request fails."""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.client import HTTPConnection, HTTPException
from typing import Any, Final

import pytest

from operator_app.api.kinds import DEPLOYMENT, ENVOY_PROXY, SERVICE, Object
from operator_app.desired import child_key, selector_labels
from tests.cluster.installed import PROXY, READY_TIMEOUT_S, Installed, available
from tests.e2e.controlplane import Report
from tests.e2e.kube import POD, wait_until
from tests.e2e.proxies import holds

INTERVAL_S: Final = 0.02
DRAINED_S: Final = 30.0
"""What drains serves on for 20 s."""

ANSWER: Final = (200, "hello from app")

pytestmark = [pytest.mark.timeout(600), pytest.mark.usefixtures("sample", "rotation")]


class Clients:
    """One client that makes a connection for each request, and one that keeps its own until it is asked to leave."""

    def __init__(self, installed: Installed) -> None:
        self.failures: list[str] = []
        self.answers = 0
        self._installed = installed
        self._address: str = installed.admin.get(SERVICE, child_key(PROXY))["spec"]["clusterIP"]
        self._ended = threading.Event()
        self._counting = threading.Lock()

    @contextmanager
    def asking(self) -> Iterator[None]:
        """Ask for as long as the block lasts."""
        threads = [threading.Thread(target=each) for each in (self._connect_anew, self._keep)]
        for each in threads:
            each.start()
        try:
            yield
        finally:
            self._ended.set()
            for each in threads:
                each.join()

    def _connect_anew(self) -> None:
        while not self._ended.wait(INTERVAL_S):
            self._count(self._installed.ask())

    def _keep(self) -> None:
        connection: HTTPConnection | None = None
        while not self._ended.wait(INTERVAL_S):
            try:
                if connection is None:
                    connection = HTTPConnection(self._address, 80, timeout=5)
                    with self._installed.inside():
                        connection.connect()
                connection.request("GET", "/", headers={"Host": "checkout.example.com"})
                answer = connection.getresponse()
                got = answer.status, answer.read().decode(errors="replace").strip()
                asked_to_leave = answer.will_close
            except (OSError, HTTPException) as error:
                got, asked_to_leave = (0, repr(error)), True
            if asked_to_leave and connection is not None:
                connection.close()
                connection = None
            self._count(got)
        if connection is not None:
            connection.close()

    def _count(self, got: tuple[int, str]) -> None:
        with self._counting:
            self.answers += 1
            if got != ANSWER:
                self.failures.append(f"{time.monotonic():.2f} {got}")


def edit(installed: Installed, **spec: Any) -> None:
    """Change the sample's spec, and wait until it is ready."""
    installed.admin.patch(ENVOY_PROXY, PROXY, {"spec": spec})
    installed.admin.wait_until(ENVOY_PROXY, PROXY, holds("Ready"), READY_TIMEOUT_S)


def pods(installed: Installed) -> list[Object]:
    """The sample's Pods that stay."""
    selector = ",".join(f"{name}={value}" for name, value in selector_labels(PROXY.name).items())
    found = installed.admin.list(POD, PROXY.namespace, label_selector=selector)
    return [each for each in found if "deletionTimestamp" not in each["metadata"]]


def evict_one(installed: Installed) -> None:
    """Evict a Pod, as a drain or an autoscaler of nodes would."""
    metadata = {name: pods(installed)[0]["metadata"][name] for name in ("namespace", "name")}
    eviction = {"apiVersion": "policy/v1", "kind": "Eviction", "metadata": metadata}
    path = f"/api/v1/namespaces/{metadata['namespace']}/pods/{metadata['name']}/eviction"
    installed.admin.request("POST", path, body=eviction)


def drain_a_node(installed: Installed) -> None:
    """Drain the node of a Pod of the proxy, of it and all others."""
    node = pods(installed)[0]["spec"]["nodeName"]
    try:
        # Only the proxy's Pods: the application behind it, a single Pod, has no second one to answer meanwhile.
        selector = ",".join(f"{name}={value}" for name, value in selector_labels(PROXY.name).items())
        installed.kubectl("drain", node, "--ignore-daemonsets", f"--pod-selector={selector}", "--timeout=180s")
        wait_complete(installed)
    finally:
        installed.kubectl("uncordon", node)


def wait_complete(installed: Installed) -> None:
    """Wait until both replicas are there and ready."""
    installed.admin.wait_until(DEPLOYMENT, child_key(PROXY), available(2), READY_TIMEOUT_S)


def test_the_sample_answers_at_its_cluster_ip(installed: Installed) -> None:
    """What the sample's first lines promise is what a client of the Service meets."""
    wait_until(lambda: installed.ask() == ANSWER, 30, "the application's answer")
    assert installed.ask("/assets/logo.svg") == (200, "hello from assets")


def test_no_request_fails_while_its_pods_are_replaced(installed: Installed, report: Report) -> None:
    """Clients of the Service notice nothing of a rollout, of an eviction, of a drain and of scaling to and fro."""
    wait_until(lambda: installed.ask() == ANSWER, 30, "the application's answer")
    clients = Clients(installed)
    with clients.asking():
        edit(installed, resources={"requests": {"cpu": "20m"}})
        edit(installed, replicas=4)
        edit(installed, replicas=1)
        edit(installed, replicas=2)
        evict_one(installed)
        wait_complete(installed)
        drain_a_node(installed)
        time.sleep(DRAINED_S)
    report(f"traffic: {clients.answers} requests, {len(clients.failures)} failed")
    assert clients.failures == []
    assert clients.answers > 1000
