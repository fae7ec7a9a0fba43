"""The client of the Kubernetes API: plain dicts in and out, errors of ``operator_app.errors``, and no retries.

lightkube builds the requests (paths, parameters, bodies) and owns the HTTP clients; responses are read in
``responses``. The version of lightkube is pinned because inner parts of it are used.
``tests/e2e/api_server/test_client_contract.py`` checks these, and every statement below about the server, on a real API
server. Deciding what to write, retrying and caching do not belong here.
"""

import contextlib
import functools
import os
import re
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Generator
from contextlib import aclosing, asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

import anyio
import httpx2
import msgspec
from lightkube.config.client_adapter import ConnectionParams
from lightkube.config.kubeconfig import SingleConfig
from lightkube.config.models import Cluster as ClusterConfig
from lightkube.config.models import Context, User
from lightkube.core.generic_client import ALL_NS, BasicRequest, GenericAsyncClient
from lightkube.core.resource import ApiInfo, ResourceDef
from lightkube.generic_resource import (
    Generic,
    GenericGlobalResource,
    GenericGlobalStatus,
    GenericNamespacedResource,
    GenericNamespacedStatus,
)
from lightkube.types import PatchType

from operator_app.api.kinds import FIELD_MANAGER, LEASE, POD, Key, Kind, Object, key_of
from operator_app.errors import NotFoundError, OperatorError, TransientError, UndecodableError
from operator_app.kube.fencing import check_before_sending
from operator_app.kube.kubeconfig import endpoint
from operator_app.kube.responses import Page, WatchEvent, object_in, page_in, refusal, watch_event
from operator_app.kube.transport import RenewedTransport, tls_context

REQUEST_EXTENSION: Final = "operator_app.request"
"""The HTTP request's ``extensions`` have the ``Request`` under this name, for transports that inspect requests."""

PAGE_BYTES: Final = 1_000_000
"""What a page of a list is to weigh, in bytes of JSON."""

MAX_PAGE_BYTES: Final = 2 * PAGE_BYTES
"""A page of several objects that weighs more is abandoned. One object weighs at most what etcd accepts, 1.5 MB."""

FIRST_PAGE: Final = 50
"""Objects on the first page, before it is known what they weigh."""

PAGES_AT_ONCE: Final = 4
"""Pages of all lists that exist at the same time."""

Verb = Literal["get", "list", "watch", "apply", "create", "update", "patch", "delete"]
Subresource = Literal["status", "log"]

_NOT_RAW_IN_YAML: Final = re.compile("[\x7f-\x9f\u2028\u2029\ufeff\ufffe\uffff]")
_READS: Final = frozenset({"get", "list", "watch"})

_LABEL: Final = re.compile(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?")
_SUBDOMAIN: Final = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*")


@dataclass(frozen=True, slots=True)
class Request:
    """One request, as observers and transports see it; ``key`` is None for lists, watches and generated names."""

    verb: Verb
    kind: Kind
    key: Key | None = None
    subresource: Subresource | None = None


@dataclass(frozen=True, slots=True)
class Applied:
    """The object after an apply, and whether that apply created it (201) or met an existing one (200)."""

    object: Object
    created: bool


BeforeWrite = Callable[[Request], None]
"""Called right before a request that may change something is sent; what it raises keeps it from being sent."""

Observer = Callable[[Request, int | None, float], None]
"""Called after each request with its HTTP status (None: no response) and the seconds until the response began."""


class Cluster:
    """One API server, one identity. Safe to share between tasks.

    Guarantees, for every method: nothing is retried; every refusal and every connection failure is one of
    ``operator_app.errors`` and carries kind and key; names and namespaces that are not DNS-1123 raise ``ValueError``
    before anything is sent. A cancelled call leaves no open stream behind, but a cancelled or timed-out write may have
    been carried out.
    """

    def __init__(
        self,
        requests: GenericAsyncClient,
        watches: GenericAsyncClient,
        *,
        request_timeout_s: float,
        write_timeout_s: float | None = None,
        observe: Observer | None = None,
        before_write: BeforeWrite | None = None,
    ) -> None:
        self._requests = requests
        self._watches = watches
        self._request_timeout_s = request_timeout_s
        self._write_timeout_s = write_timeout_s or request_timeout_s
        self._observe = observe
        self._before_write = before_write
        self._pages = anyio.Semaphore(PAGES_AT_ONCE)

    @classmethod
    @asynccontextmanager
    async def connect(  # noqa: PLR0913 - each keyword is a choice of its own, of the application or of a test
        cls,
        *,
        user_agent: str,
        kubeconfig: Path | None = None,
        context: str | None = None,
        request_timeout_s: float = 10,
        write_timeout_s: float = 65,
        max_connections: int = 32,
        observe: Observer | None = None,
        before_write: BeforeWrite | None = None,
        transport_wrapper: Callable[[httpx2.AsyncBaseTransport], httpx2.AsyncBaseTransport] | None = None,
    ) -> AsyncGenerator["Cluster"]:
        """A client that is usable while the context lasts; sends nothing by itself.

        ``request_timeout_s`` bounds each read as a whole, the wait for one of ``max_connections`` included, and
        ``write_timeout_s`` each write but those of Leases: the API server itself takes up to 60 s for a write that
        webhooks hold up, and a write that is given up before is given up every time. Watches
        have connections of their own, so that neither starves the other, and requests about Leases use the watches'
        pool, so that no burst of requests delays a renewal. ``before_write`` is called before each request but reads,
        after the wait for a connection too. ``transport_wrapper`` puts a transport around each of the two pools. Raises
        ``ConfigurationError``.
        """
        load = functools.partial(endpoint, kubeconfig, context, environ=os.environ)
        server = await anyio.to_thread.run_sync(load)
        tls = await anyio.to_thread.run_sync(tls_context, server)

        def client(connections: int | None) -> GenericAsyncClient:
            pool = RenewedTransport(server, tls, load=load, max_connections=connections)
            config = SingleConfig("operator", Context(cluster="operator"), ClusterConfig(server=server.server), User())
            wrapped = pool if transport_wrapper is None else transport_wrapper(pool)
            return GenericAsyncClient(_Connection(wrapped, user_agent, request_timeout_s), config)

        requests, watches = client(max_connections), client(None)
        try:
            yield cls(
                requests,
                watches,
                request_timeout_s=request_timeout_s,
                write_timeout_s=write_timeout_s,
                observe=observe,
                before_write=before_write,
            )
        finally:
            with anyio.CancelScope(shield=True):
                await watches.close()  # type: ignore[no-untyped-call]
                await requests.close()  # type: ignore[no-untyped-call]

    async def get(self, kind: Kind, key: Key) -> Object | None:
        """The object as stored now (a consistent read), or None when there is none.

        Raises ``NotFoundError`` (``KindNotServed``) when the server does not know the kind.
        """
        _check(kind, key)
        prepared = self._requests.prepare_request("get", _resource(kind), name=key.name, namespace=key.namespace)
        try:
            response = await self._response(Request("get", kind, key), prepared)
        except NotFoundError as error:
            if error.reason == "KindNotServed":
                raise
            return None
        return object_in(response.content, kind, key)

    async def log_of(self, pod: Key, *, container: str, lines: int, most_bytes: int) -> str:
        """The last ``lines`` that a container of ``pod`` has written, of these the first ``most_bytes``."""
        _check(POD, pod)
        params = {"container": container, "tailLines": str(lines), "limitBytes": str(most_bytes)}
        prepared = self._requests.prepare_request(
            "get", _resource(POD, "log"), name=pod.name, namespace=pod.namespace, params=params
        )
        response = await self._response(Request("get", POD, pod, "log"), prepared)
        return response.content.decode(errors="replace")

    async def list(
        self,
        kind: Kind,
        *,
        namespace: str | None = None,
        labels: str | None = None,
        page_size: int = 500,
        resource_version: str | None = None,
    ) -> AsyncGenerator[Page]:
        """The objects of a kind, in pages of one consistent snapshot; at least one page, an empty one if need be.

        Without ``resource_version`` this is a consistent read. A page has at most ``page_size`` objects, and as many as
        have taken about ``PAGE_BYTES`` so far. A response of more than ``MAX_PAGE_BYTES`` is abandoned and asked for
        again with fewer objects, down to one. At most ``PAGES_AT_ONCE`` pages exist at a time: the next list waits
        until the consumer of another asks for its next page, or closes it.

        With ``resource_version`` the list is at least that fresh and comes as one page of any size: the API advises
        against limiting such a list. A walk slower than etcd's compaction (five minutes) ends in ``GoneError``. No
        connection is held between pages.
        https://kubernetes.io/docs/reference/using-api/api-concepts/#retrieving-large-results-sets-in-chunks
        """
        params = {"labelSelector": labels, "resourceVersion": resource_version}
        prepared = self._requests.prepare_request(
            "list", _resource(kind), namespace=_scope(kind, namespace), params=params
        )
        limit = None if resource_version is not None else min(page_size, FIRST_PAGE)
        # A member of the election must not wait for somebody's long list.
        places = contextlib.nullcontext() if kind == LEASE else self._pages
        while True:
            async with places:
                if limit is not None:
                    prepared.params["limit"] = str(limit)
                body = await self._page_body(kind, prepared, None if limit in (None, 1) else MAX_PAGE_BYTES)
                if body is None:
                    limit = max(1, (limit or 1) // 4)
                    continue
                page, page_bytes = page_in(body, kind), len(body)
                del body
                if limit is not None and page.encoded:
                    fitting = PAGE_BYTES * len(page.encoded) // page_bytes
                    limit = max(1, min(page_size, 4 * limit, fitting))
                yield page
                if page.last:
                    return
                prepared.params["continue"] = page.continue_token

    async def _page_body(self, kind: Kind, prepared: BasicRequest, most_bytes: int | None) -> bytes | None:
        """The body of a list's response; ``None`` if it has more than ``most_bytes``, with the rest left unread."""
        request, body = Request("list", kind), bytearray()
        client = self._watches if kind == LEASE else self._requests
        with _failures_translated(kind, None, self._request_timeout_s), anyio.fail_after(self._request_timeout_s):
            response = await self._send(client, request, prepared, stream=True)
            try:
                async for chunk in response.aiter_bytes():
                    body += chunk
                    if most_bytes is not None and len(body) > most_bytes and response.is_success:
                        return None
            finally:
                with anyio.CancelScope(shield=True):
                    await response.aclose()
        if not response.is_success:
            raise refusal(response.status_code, response.headers, bytes(body), kind=kind)
        return bytes(body)

    @asynccontextmanager
    async def watch(
        self,
        kind: Kind,
        *,
        resource_version: str,
        timeout_s: int,
        idle_timeout_s: float,
        namespace: str | None = None,
        labels: str | None = None,
    ) -> AsyncGenerator[AsyncIterator[WatchEvent]]:
        """One watch on one connection: the events after ``resource_version``, bookmarks included.

        The server ends the stream after about ``timeout_s``, and then the iteration ends. It raises ``GoneError`` on
        410 (as a response or inside the stream), ``UndecodableError`` on a line that is no event or is cut short, and
        ``TransientError`` when the connection breaks or nothing arrives for ``idle_timeout_s``. An undecodable line
        does not hide the events before it. The connection is closed when the context ends.
        """
        params = {
            "labelSelector": labels,
            "resourceVersion": resource_version,
            "allowWatchBookmarks": "true",
            "timeoutSeconds": str(timeout_s),
        }
        prepared = self._watches.prepare_request(
            "list", _resource(kind), namespace=_scope(kind, namespace), watch=True, params=params
        )
        prepared.timeout = httpx2.Timeout(self._request_timeout_s, read=idle_timeout_s)
        response = await self._send(self._watches, Request("watch", kind), prepared, stream=True)
        try:
            if not response.is_success:
                raise await self._refused(response, kind)
            async with aclosing(_events(response, kind, idle_timeout_s)) as events:
                yield events
        finally:
            await response.aclose()

    async def apply(self, kind: Kind, obj: Object, *, force: bool, subresource: Subresource | None = None) -> Applied:
        """Server-side apply of ``obj``, which is the whole configuration that the operator's manager then owns.

        Creates an absent object (never through a subresource: that is ``NotFoundError``). Without ``force`` another
        manager's field is a ``ConflictError`` whose ``causes`` name field and manager. ``metadata.uid`` and
        ``metadata.resourceVersion`` in ``obj`` are preconditions; the contract tests show what exactly they guarantee.
        A field that the schema does not know is refused, but with a 500, so as a ``TransientError``.
        https://kubernetes.io/docs/reference/using-api/server-side-apply/
        """
        key = key_of(obj)
        _check(kind, key)
        prepared = self._requests.prepare_request(
            "patch",
            _resource(kind, subresource),
            obj,
            name=key.name,
            namespace=key.namespace,
            params={"fieldManager": FIELD_MANAGER, "fieldValidation": "Strict", "force": "true" if force else "false"},
            headers={"Content-Type": PatchType.APPLY.value},
        )
        prepared.data = _yaml(obj)
        response = await self._response(Request("apply", kind, key, subresource), prepared)
        return Applied(object_in(response.content, kind, key), created=response.status_code == 201)

    async def create(self, kind: Kind, obj: Object) -> Object:
        """Create ``obj``; ``ConflictError`` (``AlreadyExists``) when its name is taken.

        With ``metadata.generateName`` instead of a name, the server chooses one.
        """
        metadata = obj["metadata"]
        key = None if "generateName" in metadata else key_of(obj)
        _check(kind, key or Key(metadata.get("namespace", ""), "generated"))
        return await self._write("create", "post", kind, obj, key)

    async def replace(self, kind: Kind, obj: Object) -> Object:
        """PUT ``obj``; with ``metadata.resourceVersion`` a compare-and-set: ``ConflictError`` after another write."""
        key = key_of(obj)
        _check(kind, key)
        return await self._write("update", "put", kind, obj, key)

    async def merge_patch(
        self, kind: Kind, key: Key, patch: dict[str, Any], *, subresource: Subresource | None = None
    ) -> Object:
        """JSON merge patch (RFC 7396); ``metadata.resourceVersion`` in it is a precondition (``ConflictError``)."""
        _check(kind, key)
        prepared = self._requests.prepare_request(
            "patch",
            _resource(kind, subresource),
            patch,
            name=key.name,
            namespace=key.namespace,
            params={"fieldManager": FIELD_MANAGER, "fieldValidation": "Strict"},
            headers={"Content-Type": PatchType.MERGE.value},
        )
        return object_in((await self._response(Request("patch", kind, key, subresource), prepared)).content, kind, key)

    async def delete(
        self,
        kind: Kind,
        key: Key,
        *,
        uid: str,
        resource_version: str | None = None,
    ) -> bool:
        """Delete the object with this ``uid``; False when there is no object of that name any more.

        True means accepted: finalizers may keep the object for a while. ``ConflictError`` when another object has the
        name, or when ``resource_version`` is given and is not the current one.
        """
        _check(kind, key)
        if not uid:
            raise ValueError(f"a delete of {kind} {key} needs the UID of the object that is meant")
        preconditions = {"uid": uid} if resource_version is None else {"uid": uid, "resourceVersion": resource_version}
        prepared = self._requests.prepare_request("delete", _resource(kind), name=key.name, namespace=key.namespace)
        prepared.data = {
            "apiVersion": "v1",
            "kind": "DeleteOptions",
            "preconditions": preconditions,
            "propagationPolicy": "Background",
        }
        try:
            await self._response(Request("delete", kind, key), prepared)
        except NotFoundError as error:
            if error.reason == "KindNotServed":
                raise
            return False
        return True

    async def _write(
        self, verb: Verb, method: Literal["post", "put"], kind: Kind, obj: Object, key: Key | None
    ) -> Object:
        resource = _resource(kind)
        prepared = self._requests.prepare_request(
            method,
            resource,
            resource(obj),
            namespace=obj["metadata"].get("namespace"),
            params={"fieldManager": FIELD_MANAGER, "fieldValidation": "Strict"},
        )
        return object_in((await self._response(Request(verb, kind, key), prepared)).content, kind, key)

    async def _response(self, request: Request, prepared: BasicRequest) -> httpx2.Response:
        """The complete response to a request. Raises the error that a response other than 2xx stands for."""
        client = self._watches if request.kind == LEASE else self._requests
        response = await self._send(client, request, prepared)
        if not response.is_success:
            raise refusal(response.status_code, response.headers, response.content, kind=request.kind, key=request.key)
        return response

    async def _send(
        self, client: GenericAsyncClient, request: Request, prepared: BasicRequest, *, stream: bool = False
    ) -> httpx2.Response:
        is_read = request.verb in _READS
        timeout_s = self._request_timeout_s if is_read or request.kind == LEASE else self._write_timeout_s
        if not is_read:
            prepared.timeout = httpx2.Timeout(timeout_s)
        http = client.build_adapter_request(prepared)
        http.extensions[REQUEST_EXTENSION] = request
        if self._before_write is not None and not is_read:
            self._before_write(request)
            http.extensions["trace"] = check_before_sending(functools.partial(self._before_write, request))
        begun_mono = anyio.current_time()
        status: int | None = None
        try:
            with (
                _failures_translated(request.kind, request.key, timeout_s),
                anyio.fail_after(timeout_s),
            ):
                response: httpx2.Response = await client.send(http, stream=stream)  # type: ignore[no-untyped-call]
            status = response.status_code
            return response
        finally:
            if self._observe is not None:
                self._observe(request, status, anyio.current_time() - begun_mono)

    async def _refused(self, response: httpx2.Response, kind: Kind) -> OperatorError:
        """The error that a refused watch stands for, from as much of the body as arrives."""
        with _failures_translated(kind, None, self._request_timeout_s), anyio.fail_after(self._request_timeout_s):
            body = await response.aread()
        return refusal(response.status_code, response.headers, body, kind=kind)


class _Connection(ConnectionParams):
    """The parameters that lightkube passes to httpx2: a transport that has TLS and credentials, and the headers."""

    def __init__(self, transport: httpx2.AsyncBaseTransport, user_agent: str, timeout_s: float) -> None:
        super().__init__(timeout=httpx2.Timeout(timeout_s), trust_env=False)
        self._transport = transport
        self._headers = {
            "User-Agent": user_agent,
            "Accept": "application/json",
            # The server's CPU is scarcer than the network between it and a Pod: do not ask for gzip.
            "Accept-Encoding": "identity",
        }

    def httpx_params(self, config: SingleConfig) -> dict[str, Any]:
        """The keyword arguments of ``httpx2.AsyncClient``."""
        return {
            "base_url": config.cluster.server,
            "transport": self._transport,
            "timeout": self.timeout,
            "headers": self._headers,
            "trust_env": False,
        }


@functools.cache
def _resource(kind: Kind, subresource: Subresource | None = None) -> Any:  # noqa: ANN401
    """The class that represents a kind in lightkube.

    Not made by ``create_namespaced_resource``, which registers it for the whole process: a second registration of a
    core kind (by a test or a plugin) would fail.
    """
    definition = ResourceDef(kind.group, kind.version, kind.kind)
    if subresource is None:
        info = ApiInfo(
            resource=definition,
            plural=kind.plural,
            verbs=["delete", "get", "global_list", "global_watch", "list", "patch", "post", "put", "watch"],
        )
        base: type[Generic] = GenericNamespacedResource if kind.namespaced else GenericGlobalResource
    else:
        info = ApiInfo(definition, kind.plural, ["get", "patch", "put"], parent=definition, action=subresource)
        base = GenericNamespacedStatus if kind.namespaced else GenericGlobalStatus
    return type(kind.kind, (base,), {"_api_info": info})


def _yaml(obj: Object) -> msgspec.Raw:
    """``obj`` as JSON that is read as the same by a YAML parser, which is what the API server reads an apply with.

    Inside YAML's quotes a raw line break of Unicode is folded into a space and a raw control character is an error
    (YAML 1.2, sections 5.1 and 7.3.1). Escaped, both are themselves. Characters beyond the basic plane must stay raw:
    JSON would escape them as two surrogates, which YAML refuses.
    """
    text = msgspec.json.encode(obj).decode()
    return msgspec.Raw(_NOT_RAW_IN_YAML.sub(lambda found: f"\\u{ord(found[0]):04x}", text).encode())


def _check(kind: Kind, key: Key) -> None:
    """Raise ``ValueError`` for a name that would make the URL mean something else, such as a whole collection."""
    if len(key.name) > 253 or not _SUBDOMAIN.fullmatch(key.name):
        raise ValueError(f"{key.name!r} is no name of a {kind}: a DNS-1123 subdomain is needed")
    if kind.namespaced:
        _check_namespace(kind, key.namespace)
    elif key.namespace:
        raise ValueError(f"a {kind} has no namespace, but {key.namespace!r} was given")


def _check_namespace(kind: Kind, namespace: str) -> None:
    if not _LABEL.fullmatch(namespace):
        raise ValueError(f"{namespace!r} is no namespace of a {kind}: a DNS-1123 label is needed")


def _scope(kind: Kind, namespace: str | None) -> str | None:
    """The ``namespace`` argument of lightkube for a list or a watch."""
    if namespace is not None:
        if not kind.namespaced:
            raise ValueError(f"a {kind} has no namespace, but {namespace!r} was given")
        _check_namespace(kind, namespace)
        return namespace
    return ALL_NS if kind.namespaced else None


async def _events(response: httpx2.Response, kind: Kind, idle_timeout_s: float) -> AsyncGenerator[WatchEvent]:
    """The stream's lines as events. Only the newline byte ends a line: JSON strings may contain other separators."""
    partial: list[bytes] = []
    async with aclosing(_chunks(response, kind, idle_timeout_s)) as chunks:
        async for chunk in chunks:
            *lines, tail = chunk.split(b"\n")
            for line in lines:
                partial.append(line)
                whole = b"".join(partial)
                partial.clear()
                if whole.strip():
                    yield watch_event(whole, kind)
            partial.append(tail)
    if b"".join(partial).strip():
        raise UndecodableError("the watch was cut inside an object", kind=kind)


async def _chunks(response: httpx2.Response, kind: Kind, idle_timeout_s: float) -> AsyncGenerator[bytes]:
    async with aclosing(response.aiter_bytes()) as stream:
        while True:
            with _failures_translated(kind, None, idle_timeout_s), anyio.fail_after(idle_timeout_s):
                chunk = await anext(stream, None)
            if chunk is None:
                return
            yield chunk


@contextmanager
def _failures_translated(kind: Kind, key: Key | None, timeout_s: float) -> Generator[None]:
    """Raise every time-out and connection failure as a ``TransientError``."""
    try:
        yield
    except (TimeoutError, httpx2.TimeoutException) as error:
        raise TransientError(f"nothing came from the API server for {timeout_s:g} s", kind=kind, key=key) from error
    except httpx2.LocalProtocolError as error:
        # It is about the operator's own request, and its text may quote a header, so only the type is shown.
        sentence = f"the request to the API server could not be sent: {type(error).__name__}"
        raise TransientError(sentence, kind=kind, key=key) from None
    except (httpx2.HTTPError, OSError) as error:
        # httpcore2 lets what TLS raises behind the handshake through as it is: an ssl.SSLError, which is an OSError.
        sentence = f"the connection to the API server failed: {str(error) or type(error).__name__}"
        raise TransientError(sentence, kind=kind, key=key) from error
