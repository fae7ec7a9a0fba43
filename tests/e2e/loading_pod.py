"""A Pod that is on no node: to the API server it serves, and the operator is told what it has loaded, as by an Envoy.

It loads the ConfigMap when it starts and when it is touched, and never by itself, as a kubelet does within a minute. So
a test that waits for what it has ``loaded`` sees every touch that is missing.
"""

import json
import secrets
from collections.abc import Iterator, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from ipaddress import IPv4Network
from pathlib import PurePath
from threading import Thread
from types import TracebackType
from typing import Final, Self

from operator_app.api.kinds import ANNOTATION_CONFIGURATION, ANNOTATION_REVISION, CONFIG_MAP, Key, Object, Value
from operator_app.api.models import READINESS_PORT
from operator_app.desired import CONTAINER_NAME, child_key
from operator_app.envoy.files import version_of
from operator_app.envoy.internal import CLUSTERS_STAT, LISTENERS_STAT, LOADED_PATH, routes_stat
from tests.e2e.kube import POD, Kube
from tests.e2e.proxies import serve

_LOOPBACK: Final = IPv4Network("127.128.0.0/9")
_TRIES: Final = 100


class LoadingPod:
    """The one Pod of a proxy, from ``follow`` on; a context manager that answers for it.

    The Pod belongs to the proxy itself and to no ReplicaSet, so a Deployment without replicas leaves it alone.
    """

    def __init__(self, admin: Kube) -> None:
        self._admin = admin
        self._pod: Object | None = None
        self._proxy: Key | None = None
        self._touched_by: str | None = None
        self.loaded: Mapping[str, str] = {}
        """The files that it has loaded, by their names."""
        self._server = _listening(self)

    def __enter__(self) -> Self:
        Thread(target=self._server.serve_forever, args=(0.02,), daemon=True).start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.shutdown()
        self._server.server_close()

    def follow(self, proxy: Object, deployment: Object) -> None:
        """Be the Pod of this template: the one before is replaced if it is of another revision, or of another proxy."""
        metadata, template = proxy["metadata"], deployment["spec"]["template"]["metadata"]
        revision = {ANNOTATION_REVISION: template["annotations"][ANNOTATION_REVISION]}
        key = Key(metadata["namespace"], metadata["name"])
        if self._pod is not None:
            live = self._admin.find(POD, self._key)
            if live is not None and self._proxy == key and revision.items() <= live["metadata"]["annotations"].items():
                return
            if live is not None:
                self._admin.delete(POD, self._key)
                self._admin.wait_gone(POD, self._key, uid=live["metadata"]["uid"])
        owner = {name: proxy[name] for name in ("apiVersion", "kind")} | {"name": key.name, "uid": metadata["uid"]}
        pod = {
            "apiVersion": POD.api_version,
            "kind": POD.kind,
            "metadata": {
                "namespace": key.namespace,
                "name": f"{key.name}-loading",
                "labels": template["labels"],
                "annotations": revision,
                "ownerReferences": [owner | {"controller": True}],
            },
            "spec": {"schedulerName": "none", "containers": [{"name": CONTAINER_NAME, "image": "none"}]},
        }
        self._proxy, self._touched_by = key, None
        self._pod = self._admin.create(POD, pod)
        self.loaded = self._admin.get(CONFIG_MAP, child_key(key))["data"]
        serve(self._admin, self._key, str(self._server.server_address[0]))

    def live(self) -> Object:
        """The Pod as the API server has it."""
        return self._admin.get(POD, self._key)

    @property
    def _key(self) -> Key:
        assert self._pod is not None
        return Key(self._pod["metadata"]["namespace"], self._pod["metadata"]["name"])

    def answer(self) -> str:
        """What it has loaded, as Envoy's statistics say it."""
        assert self._pod is not None
        assert self._proxy is not None
        annotations = self._admin.get(POD, self._key)["metadata"]["annotations"]
        if self._touched_by != annotations.get(ANNOTATION_CONFIGURATION):
            self._touched_by = annotations[ANNOTATION_CONFIGURATION]
            self.loaded = self._admin.get(CONFIG_MAP, child_key(self._proxy))["data"]
        return "\n".join(_statistics(self.loaded, annotations[ANNOTATION_REVISION]))


def _listening(pod: LoadingPod) -> ThreadingHTTPServer:
    """A server at the port that the operator asks, at an address of this machine that nobody else has."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:  # the name is the base class's
            body = pod.answer().encode() if self.path == LOADED_PATH else b""
            self.send_response(200 if body else 404)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:  # noqa: A002  # the name is the base class's
            pass

    for _ in range(_TRIES):
        address = str(_LOOPBACK[secrets.randbelow(_LOOPBACK.num_addresses)])
        try:
            return ThreadingHTTPServer((address, READINESS_PORT), Handler)
        except OSError:
            continue
    msg = f"port {READINESS_PORT} is taken at {_TRIES} addresses"
    raise AssertionError(msg)


def _statistics(texts: Mapping[str, str], revision: str) -> Iterator[str]:
    """The lines of an Envoy that was started with the bootstrap of ``revision`` and has loaded these files."""
    sources = json.loads(texts[f"envoy-{revision}.json"])["dynamic_resources"]
    listeners = _text_at(texts, sources["lds_config"])
    yield _loaded(LISTENERS_STAT, listeners)
    yield _loaded(CLUSTERS_STAT, _text_at(texts, sources["cds_config"]))
    for each in _with_name(json.loads(listeners), "rds"):
        yield _loaded(routes_stat(each["route_config_name"]), _text_at(texts, each["config_source"]))
    for name, text in texts.items():
        if name.startswith("sds-"):
            for secret in json.loads(text)["resources"]:
                yield f"sds.{secret['name']}.update_success: 1"
                yield f"listener.ssl.certificate.{secret['name']}.expiration_unix_time_seconds: 4102444800"


def _loaded(stat: str, text: str) -> str:
    return f'{stat}.version_text: "{version_of(text)}"'


def _text_at(texts: Mapping[str, str], source: Object) -> str:
    return texts[PurePath(source["path_config_source"]["path"]).name]


def _with_name(value: Value, name: str) -> Iterator[Value]:
    """Every value called ``name`` in a JSON document."""
    if isinstance(value, dict):
        yield from (inner for key, inner in value.items() if key == name)
        for inner in value.values():
            yield from _with_name(inner, name)
    elif isinstance(value, list):
        for inner in value:
            yield from _with_name(inner, name)
