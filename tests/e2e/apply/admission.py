"""Refusals on demand: a child's annotation says how the operator's next write of it is refused, and with which code.

A ValidatingAdmissionPolicy and a validating webhook watch one namespace. They refuse what the operator alone sends, and
only for objects that carry the annotation, so that refusing and allowing takes one patch and no waiting.
"""

import json
import ssl
import threading
from base64 import b64encode
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Final

import trustme

from operator_app.api.kinds import CONFIG_MAP, Key, Kind, Object
from tests.e2e.kube import Kube, KubeError, wait_until

GROUP: Final = "admissionregistration.k8s.io"
POLICY: Final = Kind(GROUP, "v1", "ValidatingAdmissionPolicy", "validatingadmissionpolicies", namespaced=False)
BINDING: Final = Kind(
    GROUP, "v1", "ValidatingAdmissionPolicyBinding", "validatingadmissionpolicybindings", namespaced=False
)
WEBHOOK: Final = Kind(
    GROUP, "v1", "ValidatingWebhookConfiguration", "validatingwebhookconfigurations", namespaced=False
)

ANNOTATION: Final = "example.com/refused"
"""On a child: one of ``BY_POLICY`` or ``BY_WEBHOOK``."""

_REASONS: Final = {
    "policy 403": "Forbidden",
    "policy 422": "Invalid",
}
BY_POLICY: Final = tuple(_REASONS)
BY_WEBHOOK: Final = tuple(f"webhook {code}" for code in (400, 401, 403, 404, 409, 413, 422, 500, 503))

ENFORCED_S: Final = 60.0
_RULE: Final[Object] = {
    "apiGroups": ["", "apps"],
    "apiVersions": ["v1"],
    "operations": ["CREATE", "UPDATE"],
    "resources": ["configmaps", "services", "deployments"],
}


@contextmanager
def refusing_policy(admin: Kube, operator: Kube, namespace: str, user: str) -> Iterator[None]:
    """The policy for one namespace; ``operator`` sends as the ``user`` whose writes are judged."""
    name = f"refuse-{namespace}"
    found = f"has(object.metadata.annotations) && '{ANNOTATION}' in object.metadata.annotations"
    validations = [
        {
            "expression": f"!({found} && object.metadata.annotations['{ANNOTATION}'] == '{value}')",
            "message": value,
            "reason": reason,
        }
        for value, reason in _REASONS.items()
    ]
    constraints = {"resourceRules": [_RULE], "namespaceSelector": _selector(namespace)}
    spec = {
        "failurePolicy": "Fail",
        "matchConstraints": constraints,
        "matchConditions": _conditions(user),
        "validations": validations,
    }
    admin.create(POLICY, _object(POLICY, name) | {"spec": spec})
    bound = {"policyName": name, "validationActions": ["Deny"]}
    admin.create(BINDING, _object(BINDING, name) | {"spec": bound})
    try:
        wait_until(lambda: _is_refused(operator, namespace, BY_POLICY[0]), ENFORCED_S, "the policy to be enforced")
        yield
    finally:
        admin.delete(BINDING, Key("", name))
        admin.delete(POLICY, Key("", name))


@contextmanager
def refusing_webhook(admin: Kube, operator: Kube, namespace: str, user: str, directory: Path) -> Iterator[None]:
    """The webhook for one namespace, served from this process; as ``refusing_policy`` else."""
    name = f"refuse-{namespace}"
    authority = trustme.CA()
    with _served(authority, directory) as port:
        certificate = b64encode(authority.cert_pem.bytes()).decode()
        webhook = {
            "name": "refuse.example.com",
            "clientConfig": {"url": f"https://127.0.0.1:{port}/", "caBundle": certificate},
            "rules": [_RULE | {"scope": "Namespaced"}],
            "namespaceSelector": _selector(namespace),
            "matchConditions": _conditions(user),
            "failurePolicy": "Fail",
            "timeoutSeconds": 10,
            "sideEffects": "None",
            "admissionReviewVersions": ["v1"],
        }
        admin.create(WEBHOOK, _object(WEBHOOK, name) | {"webhooks": [webhook]})
        try:
            wait_until(lambda: _is_refused(operator, namespace, BY_WEBHOOK[0]), ENFORCED_S, "the webhook to be asked")
            yield
        finally:
            admin.delete(WEBHOOK, Key("", name))


def _selector(namespace: str) -> Object:
    return {"matchLabels": {"kubernetes.io/metadata.name": namespace}}


def _conditions(user: str) -> list[Object]:
    return [{"name": "of-the-operator", "expression": f"request.userInfo.username == '{user}'"}]


def _object(kind: Kind, name: str) -> Object:
    return {"apiVersion": kind.api_version, "kind": kind.kind, "metadata": {"name": name}}


def _is_refused(operator: Kube, namespace: str, how: str) -> bool:
    """Whether a write that is to be refused in this way is: a new policy or webhook takes a moment."""
    metadata = {"name": "probe", "namespace": namespace, "annotations": {ANNOTATION: how}}
    try:
        operator.apply(CONFIG_MAP, {"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata}, dry_run=True)
    except KubeError as error:
        return how in str(error)
    return False


@contextmanager
def _served(authority: trustme.CA, directory: Path) -> Iterator[int]:
    """The webhook's server on a port of its own."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert("127.0.0.1").configure_cert(context)
    with ThreadingHTTPServer(("127.0.0.1", 0), _Handler) as server:
        server.socket = context.wrap_socket(server.socket, server_side=True)
        thread = threading.Thread(target=server.serve_forever, name=f"webhook of {directory.name}")
        thread.start()
        try:
            port: int = server.server_address[1]
            yield port
        finally:
            server.shutdown()
            thread.join()


class _Handler(BaseHTTPRequestHandler):
    """Judges one object by its annotation."""

    def do_POST(self) -> None:
        """Allow, or deny with the code that the annotation asks for."""
        review = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        annotations = review["request"]["object"]["metadata"].get("annotations") or {}
        how = annotations.get(ANNOTATION, "")
        answer: Object = {"uid": review["request"]["uid"], "allowed": how not in BY_WEBHOOK}
        if not answer["allowed"]:
            answer["status"] = {"code": int(how.split()[1]), "message": how}
        body = json.dumps({"apiVersion": review["apiVersion"], "kind": review["kind"], "response": answer}).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    log_message: Callable[..., None] = staticmethod(lambda *_: None)
