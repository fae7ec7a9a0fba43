"""Secrets of TLS that come late, on a real node: nothing else waits, the status names them, and then they are used."""

import base64
import os
import socket
import ssl
import time
from collections.abc import Callable

import pytest
import trustme

from operator_app.api.kinds import ENVOY_PROXY, POD, Key, Object, key_of
from tests.e2e.envoy.test_traffic import BACKENDS, READY_TIMEOUT_S, Client, create_backends, is_ready, proxy_pods
from tests.e2e.kube import SECRET, SERVICE_ACCOUNT, Kube, wait_until
from tests.e2e.node.fixture import Nodes
from tests.e2e.proxies import a_proxy, condition, holds, wait_ready
from tests.e2e.reload.test_reload import ARRIVAL_S, PORT, edit

NAME = "shop.example.com"
TLS_PORT = 10443
UNAIDED_S = 120.0
"""A kubelet that nothing makes look takes 60 to 90 s."""

pytestmark = [pytest.mark.reload, pytest.mark.usefixtures("running_operator"), pytest.mark.timeout(900)]


@pytest.fixture
def namespace(admin: Kube, namespace: str, nodes: Nodes) -> str:
    """A namespace in which Pods may be created, with backends that answer with their names."""
    if nodes.local is None:
        pytest.skip("the operator of this test runs where Pods can be reached, which takes the local node")
    admin.wait_until(SERVICE_ACCOUNT, Key(namespace, "default"), bool)
    create_backends(admin, namespace)
    return namespace


def encrypted(namespace: str, *backends: Object) -> Object:
    """A proxy with a listener that speaks TLS beside one that does not, and these backends beside the one of both."""
    host = f"backends.{namespace}.svc.cluster.local"
    app = {"name": "app", "endpoints": [{"host": host, "port": BACKENDS["app"]}], "connectTimeout": "1s"}
    routes = [{"match": {"pathPrefix": f"/{each['name']}"}, "backend": each["name"]} for each in backends]
    listeners = [
        {"name": "http", "port": 80, "routes": [*routes, {"backend": "app"}]},
        {"name": "https", "port": 443, "tls": {"secretName": "shop-tls"}, "routes": [{"backend": "app"}]},
    ]
    return a_proxy(namespace, listeners=listeners, backends=[app, *backends])


def secret(namespace: str, name: str, **data: bytes) -> Object:
    """A Secret; underscores in keys stand for dots."""
    encoded = {key.replace("_", "."): base64.b64encode(value).decode() for key, value in data.items()}
    return {"apiVersion": "v1", "kind": "Secret", "metadata": {"namespace": namespace, "name": name}, "data": encoded}


def handshake(nodes: Nodes, address: str, authority: trustme.CA) -> bool:
    """Whether a client that trusts ``authority`` gets a connection."""
    context = ssl.create_default_context()
    authority.configure_trust(context)
    try:
        with nodes.inside():
            plain = socket.create_connection((address, TLS_PORT), timeout=3)
        with plain, context.wrap_socket(plain, server_hostname=NAME):
            return True
    except OSError:
        return False


def look_now(admin: Kube, pod: Object) -> None:
    """Make the kubelet look at a Pod, as it does by itself every 60 to 90 s; left to that with ``RELOAD_UNAIDED``."""
    if "RELOAD_UNAIDED" in os.environ:
        return
    admin.patch(POD, key_of(pod), {"metadata": {"annotations": {"example.com/look": "now"}}})


def names(name: str) -> Callable[[Object], bool]:
    """A predicate: the proxy is not ready, and the status says that it is for want of this Secret."""
    return lambda live: (
        condition(live, "Programmed").get("reason") == "InvalidCertificateRef"
        and f"in Secret {name}," in condition(live, "Programmed")["message"]
        and condition(live, "Ready")["reason"] == "InvalidCertificateRef"
    )


def test_a_missing_certificate_harms_no_other_listener(admin: Kube, namespace: str, nodes: Nodes) -> None:
    """The proxy serves what it can, names the Secret, and serves the rest in the same Pod once that is there."""
    key, authority = Key(namespace, "web"), trustme.CA()
    admin.create(ENVOY_PROXY, encrypted(namespace))
    told = admin.wait_until(ENVOY_PROXY, key, names("shop-tls"), READY_TIMEOUT_S)
    assert not condition(told, "Stalled")
    (pod,) = proxy_pods(admin, key)
    address = pod["status"]["podIP"]
    wait_until(lambda: Client(nodes)(address, PORT) == (200, "app"), ARRIVAL_S, "the other listener")
    assert not handshake(nodes, address, authority)

    leaf = authority.issue_cert(NAME)
    chain, private = leaf.cert_chain_pems[0].bytes(), leaf.private_key_pem.bytes()
    admin.create(SECRET, secret(namespace, "shop-tls", tls_crt=chain, tls_key=private))
    created_mono = time.monotonic()
    look_now(admin, pod)
    wait_until(lambda: handshake(nodes, address, authority), UNAIDED_S, "the certificate")
    print(f"the certificate is served {time.monotonic() - created_mono:.1f} s after its Secret was created")
    wait_ready(admin, key, READY_TIMEOUT_S)
    (same,) = proxy_pods(admin, key)
    assert same["metadata"]["uid"] == pod["metadata"]["uid"]
    assert same["status"]["containerStatuses"][0]["restartCount"] == 0

    verified: Object = {"name": "next", "endpoints": [{"host": "10.96.0.9", "port": 443}], "connectTimeout": "250ms"}
    verified["tls"] = {"serverName": "next.internal", "caSecretName": "internal-ca"}
    generation = edit(admin, key, encrypted(namespace, verified))
    answers = set()
    while not any(is_ready(each) for each in proxy_pods(admin, key) if key_of(each) != key_of(pod)):
        answers.add(Client(nodes)(address, PORT))
    assert answers == {(200, "app")}, "the older Pod keeps what it can serve"
    admin.wait_until(ENVOY_PROXY, key, names("internal-ca"), READY_TIMEOUT_S)
    wait_until(lambda: len(proxy_pods(admin, key)) == 1, READY_TIMEOUT_S, "the end of the older Pod")
    (pod,) = proxy_pods(admin, key)
    address = pod["status"]["podIP"]
    assert Client(nodes)(address, PORT) == (200, "app")
    assert Client(nodes)(address, PORT, path="/next")[0] == 503
    admin.create(SECRET, secret(namespace, "internal-ca", ca_crt=authority.cert_pem.bytes()))
    look_now(admin, pod)
    admin.wait_until(ENVOY_PROXY, key, holds("Ready", generation=generation), READY_TIMEOUT_S)
