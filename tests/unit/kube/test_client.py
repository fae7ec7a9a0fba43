"""The client over a scripted transport: what is sent, and what every shape of response becomes."""

import json
import ssl
import traceback
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import anyio
import anyio.abc
import httpx2
import pytest

from operator_app.api.kinds import CONFIG_MAP, DEPLOYMENT, ENVOY_PROXY, LEASE, NAMESPACE, Key, Object
from operator_app.errors import (
    Cause,
    ConflictError,
    ForbiddenError,
    GoneError,
    InvalidError,
    NotFoundError,
    OperatorError,
    PolicyError,
    ThrottledError,
    TransientError,
    UndecodableError,
)
from operator_app.kube.client import MAX_PAGE_BYTES, PAGES_AT_ONCE, REQUEST_EXTENSION, Cluster, Request
from operator_app.kube.responses import WatchEvent
from tests.unit.kube.scripted_client import kubeconfig_in

pytestmark = pytest.mark.anyio

KEY = Key("team-a", "checkout")
OBJECT: Object = {
    "apiVersion": "v1",
    "kind": "ConfigMap",
    "metadata": {"name": "checkout", "namespace": "team-a", "uid": "u-1", "resourceVersion": "7"},
}
Handler = Callable[[httpx2.Request], httpx2.Response | Awaitable[httpx2.Response]]


class Scripted(httpx2.AsyncBaseTransport):
    """Answers by a function, and keeps what was asked."""

    def __init__(self, handler: Handler) -> None:
        self._mock = httpx2.MockTransport(handler)  # type: ignore[arg-type]  # it takes either, mixed too
        self.requests: list[httpx2.Request] = []

    async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
        """The scripted answer."""
        self.requests.append(request)
        return await self._mock.handle_async_request(request)

    def connected(self, kubeconfig: Path, **options: Any) -> AbstractAsyncContextManager[Cluster]:
        """A cluster whose every request comes here."""
        return Cluster.connect(kubeconfig=kubeconfig, user_agent="test/1", transport_wrapper=lambda _: self, **options)


def answering(status: int, body: Object | bytes = OBJECT, **headers: str) -> Scripted:
    """A server that always gives the same answer; a body that is no bytes is sent as JSON."""
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    sent = {"Content-Type": "application/json"} | {name.replace("_", "-"): value for name, value in headers.items()}
    return Scripted(lambda _: httpx2.Response(status, content=content, headers=sent))


def status_body(code: int, reason: str, **details: Any) -> Object:
    """A ``metav1.Status``."""
    return {
        "kind": "Status",
        "apiVersion": "v1",
        "status": "Failure",
        "code": code,
        "reason": reason,
        "message": "a sentence",
        "details": details,
    }


# --- what is sent --------------------------------------------------------------------------------------------------


async def test_an_apply_is_one_patch_of_the_whole_configuration(kubeconfig: Path) -> None:
    """Apply sends our manager, strict validation, the force asked for, and the object as it is."""
    server = answering(201)
    async with server.connected(kubeconfig) as cluster:
        applied = await cluster.apply(CONFIG_MAP, OBJECT, force=False)
    (request,) = server.requests
    assert (request.method, request.url.path) == ("PATCH", "/api/v1/namespaces/team-a/configmaps/checkout")
    assert dict(request.url.params) == {
        "fieldManager": "operator-app",
        "fieldValidation": "Strict",
        "force": "false",
    }
    assert request.headers["Content-Type"] == "application/apply-patch+yaml"
    assert request.headers["User-Agent"] == "test/1"
    assert json.loads(request.content) == OBJECT
    assert (applied.created, applied.object) == (True, OBJECT)


async def test_a_status_apply_goes_to_the_subresource_in_the_objects_namespace(kubeconfig: Path) -> None:
    """The namespace comes from the metadata, and 200 means that nothing was created."""
    server = answering(200)
    async with server.connected(kubeconfig) as cluster:
        applied = await cluster.apply(ENVOY_PROXY, OBJECT, force=True, subresource="status")
    (request,) = server.requests
    assert request.url.path.endswith("/v1alpha1/namespaces/team-a/envoyproxies/checkout/status")
    assert request.url.params["force"] == "true"
    assert request.extensions[REQUEST_EXTENSION] == Request("apply", ENVOY_PROXY, KEY, "status")
    assert not applied.created


async def test_a_log_is_text_of_a_bounded_length(kubeconfig: Path) -> None:
    """The end of what one container has written; bytes that are no text are replaced."""
    server = answering(200, b"one\ntw\xff\n")
    async with server.connected(kubeconfig) as cluster:
        assert await cluster.log_of(KEY, container="envoy", lines=2, most_bytes=100) == "one\ntw\ufffd\n"
    (request,) = server.requests
    assert (request.method, request.url.path) == ("GET", "/api/v1/namespaces/team-a/pods/checkout/log")
    assert dict(request.url.params) == {"container": "envoy", "tailLines": "2", "limitBytes": "100"}


async def test_a_delete_carries_its_preconditions(kubeconfig: Path) -> None:
    """A delete is of one UID, and of one resourceVersion where that is given."""
    server = answering(200)
    async with server.connected(kubeconfig) as cluster:
        assert await cluster.delete(CONFIG_MAP, KEY, uid="u-1", resource_version="7")
    (request,) = server.requests
    assert (request.method, request.url.path) == ("DELETE", "/api/v1/namespaces/team-a/configmaps/checkout")
    body = json.loads(request.content)
    assert body["preconditions"] == {"uid": "u-1", "resourceVersion": "7"}
    assert body["propagationPolicy"] == "Background"


async def test_create_replace_and_merge_patch_are_what_their_names_say(kubeconfig: Path) -> None:
    """POST to the collection, PUT and merge PATCH to the object."""
    server = answering(200)
    async with server.connected(kubeconfig) as cluster:
        await cluster.create(CONFIG_MAP, OBJECT)
        await cluster.replace(CONFIG_MAP, OBJECT)
        await cluster.merge_patch(CONFIG_MAP, KEY, {"data": None})
    sent = [(request.method, request.url.path.rpartition("/")[2]) for request in server.requests]
    assert sent == [("POST", "configmaps"), ("PUT", "checkout"), ("PATCH", "checkout")]
    assert [json.loads(request.content) for request in server.requests] == [OBJECT, OBJECT, {"data": None}]
    assert server.requests[2].headers["Content-Type"] == "application/merge-patch+json"


@pytest.mark.parametrize(
    "key",
    [
        Key("team-a", ""),
        Key("team-a", ".."),
        Key("team-a", "../secrets/x"),
        Key("team-a", "Upper"),
        Key("team-a", "a/b"),
        Key("team-a", "a?b"),
        Key("team-a", "a" * 254),
        Key("team-a", "trailing\n"),
        Key("", "checkout"),
        Key("*", "checkout"),
        Key("a.b", "checkout"),
        Key("a" * 64, "checkout"),
    ],
    ids=repr,
)
async def test_no_name_leaves_that_could_mean_something_else(kubeconfig: Path, key: Key) -> None:
    """A name or namespace that is not DNS-1123 raises ValueError, and nothing is sent."""
    server = answering(200)
    obj = {**OBJECT, "metadata": {"namespace": key.namespace, "name": key.name}}
    async with server.connected(kubeconfig) as cluster:
        for call in (
            cluster.get(CONFIG_MAP, key),
            cluster.delete(CONFIG_MAP, key, uid="u-1"),
            cluster.apply(CONFIG_MAP, obj, force=False),
            cluster.create(CONFIG_MAP, obj),
            cluster.replace(CONFIG_MAP, obj),
            cluster.merge_patch(CONFIG_MAP, key, {}),
        ):
            with pytest.raises(ValueError, match="DNS-1123"):
                await call
    assert server.requests == []


async def test_no_scope_leaves_that_the_kind_does_not_have(kubeconfig: Path) -> None:
    """A namespace where there is none, a bad one for a list, and a delete without UID raise ValueError."""
    server = answering(200)
    async with server.connected(kubeconfig) as cluster:
        with pytest.raises(ValueError, match="has no namespace"):
            await cluster.get(NAMESPACE, KEY)
        with pytest.raises(ValueError, match="has no namespace"):
            await anext(cluster.list(NAMESPACE, namespace="team-a"))
        with pytest.raises(ValueError, match="DNS-1123"):
            await anext(cluster.list(CONFIG_MAP, namespace=""))
        with pytest.raises(ValueError, match="UID"):
            await cluster.delete(CONFIG_MAP, KEY, uid="")
    assert server.requests == []


# --- what answers become -------------------------------------------------------------------------------------------

HTML = b"<html><body>Bad gateway</body></html>"
SHAPES: list[tuple[bytes, dict[str, str]]] = [
    (b'{"kind":"Status","message":"m","details":null}', {"Content-Type": "application/json"}),
    (b'{"kind":"Status","message":"m"}', {"Content-Type": "application/json; charset=utf-8"}),
    (b"no can do", {"Content-Type": "text/plain"}),
    (HTML, {"Content-Type": "text/html"}),
    (HTML, {"Content-Type": "application/json"}),
    (b"", {"Content-Type": "application/json"}),
    (b"", {}),
    (b"[]", {"Content-Type": "application/json"}),
    (b'"\xff"', {"Content-Type": "application/json"}),
    (b'{"kind":"Status","code":"x"}', {"Content-Type": "application/json"}),
]


@pytest.mark.parametrize(("body", "headers"), SHAPES, ids=str)
@pytest.mark.parametrize(
    ("code", "expected"),
    [
        (302, TransientError),
        (400, InvalidError),
        (401, ForbiddenError),
        (403, ForbiddenError),
        (404, NotFoundError),
        (408, TransientError),
        (409, ConflictError),
        (410, GoneError),
        (413, InvalidError),
        (415, InvalidError),
        (418, InvalidError),
        (422, InvalidError),
        (429, ThrottledError),
        (499, InvalidError),
        (500, TransientError),
        (502, TransientError),
        (503, TransientError),
        (504, TransientError),
        (599, TransientError),
    ],
)
async def test_every_refusal_in_every_shape_is_an_operator_error(
    kubeconfig: Path, code: int, expected: type[OperatorError], body: bytes, headers: dict[str, str]
) -> None:
    """The status code decides the class, whatever the body is or claims to be, for plain requests and for watches.

    A Status without details is an admission webhook's: the API server's own refusals name a kind or a field.
    """
    if code in {400, 403, 422} and b'"message":"m"' in body:
        expected = PolicyError
    server = Scripted(lambda _: httpx2.Response(code, content=body, headers=headers))
    async with server.connected(kubeconfig) as cluster:
        with pytest.raises(OperatorError) as refused:
            await cluster.apply(CONFIG_MAP, OBJECT, force=False)
        with pytest.raises(OperatorError) as unwatched:
            await delivered(cluster)
    assert (type(refused.value), type(unwatched.value)) == (expected, expected)
    assert (refused.value.kind, refused.value.key) == (CONFIG_MAP, KEY)
    assert str(code) in str(refused.value)
    assert "\n" not in str(refused.value)


async def test_conflicts_keep_reason_and_causes(kubeconfig: Path) -> None:
    """A conflict tells AlreadyExists from Conflict and names the fields."""
    cause = {"reason": "FieldManagerConflict", "message": 'conflict with "x"', "field": ".spec.replicas"}
    async with answering(409, status_body(409, "Conflict", causes=[cause])).connected(kubeconfig) as cluster:
        with pytest.raises(ConflictError) as conflict:
            await cluster.apply(CONFIG_MAP, OBJECT, force=False)
    assert conflict.value.causes == (Cause(".spec.replicas", "FieldManagerConflict", 'conflict with "x"'),)
    async with answering(409, status_body(409, "AlreadyExists")).connected(kubeconfig) as cluster:
        with pytest.raises(ConflictError) as conflict:
            await cluster.create(CONFIG_MAP, OBJECT)
    assert conflict.value.reason == "AlreadyExists"


async def test_json_that_is_no_status_says_nothing(kubeconfig: Path) -> None:
    """A proxy's JSON error is not read as a Status, even where the names of its fields are the same."""
    body = {"message": "proxy", "reason": "Odd", "details": {"retryAfterSeconds": 99}}
    async with answering(409, body).connected(kubeconfig) as cluster:
        with pytest.raises(ConflictError, match="without a Status") as conflict:
            await cluster.apply(CONFIG_MAP, OBJECT, force=False)
    assert conflict.value.reason == "Conflict"
    async with answering(503, body).connected(kubeconfig) as cluster:
        with pytest.raises(TransientError) as unavailable:
            await cluster.get(CONFIG_MAP, KEY)
    assert unavailable.value.retry_after_s is None


async def test_invalid_keeps_its_causes(kubeconfig: Path) -> None:
    """A refused object names its fields; a reason is always there and CamelCase."""
    cause = {"reason": "FieldValueInvalid", "message": "immutable", "field": "spec.selector"}
    async with answering(422, status_body(422, "Invalid", causes=[cause])).connected(kubeconfig) as cluster:
        with pytest.raises(InvalidError) as invalid:
            await cluster.apply(CONFIG_MAP, OBJECT, force=False)
    assert (invalid.value.reason, invalid.value.causes[0].field) == ("Invalid", "spec.selector")
    async with answering(415, b"").connected(kubeconfig) as cluster:
        with pytest.raises(InvalidError) as invalid:
            await cluster.apply(CONFIG_MAP, OBJECT, force=False)
    assert invalid.value.reason == "UnsupportedMediaType"


@pytest.mark.parametrize("code", [429, 503, 500])
@pytest.mark.parametrize(
    ("headers", "details", "expected"),
    [
        ({"Retry_After": "7"}, {}, 7.0),
        ({"Retry_After": "7"}, {"retryAfterSeconds": 3}, 7.0),
        ({}, {"retryAfterSeconds": 3}, 3.0),
        ({"Retry_After": "Sun, 29 Nov 2026 10:00:30 GMT", "Date": "Sun, 29 Nov 2026 10:00:00 GMT"}, {}, 30.0),
        ({"Retry_After": "Sun, 29 Nov 2026 09:00:00 GMT", "Date": "Sun, 29 Nov 2026 10:00:00 GMT"}, {}, 0.0),
        ({"Retry_After": "Sun, 29 Nov 2026 10:00:30 GMT"}, {}, None),
        ({"Retry_After": "-1"}, {}, None),
        ({"Retry_After": "soon"}, {}, None),
        ({}, {}, None),
    ],
    ids=str,
)
async def test_retry_after_is_in_the_error(
    kubeconfig: Path, code: int, headers: dict[str, str], details: dict[str, Any], expected: float | None
) -> None:
    """Retry-After in seconds or as a date (counted from the answer's own Date), else details.retryAfterSeconds."""
    async with answering(code, status_body(code, "x", **details), **headers).connected(kubeconfig) as cluster:
        with pytest.raises(TransientError) as refused:
            await cluster.get(CONFIG_MAP, KEY)
    assert refused.value.retry_after_s == expected


async def test_an_absent_object_is_none_and_an_unserved_kind_is_an_error(kubeconfig: Path) -> None:
    """Only a 404 that names the object means that the object is absent."""
    async with answering(404, status_body(404, "NotFound", name="checkout")).connected(kubeconfig) as cluster:
        assert await cluster.get(CONFIG_MAP, KEY) is None
        assert not await cluster.delete(CONFIG_MAP, KEY, uid="u-1")
        with pytest.raises(NotFoundError) as absent:
            await cluster.apply(CONFIG_MAP, OBJECT, force=True, subresource="status")
        assert absent.value.reason == "NotFound"
    async with answering(404, b"404 page not found\n", Content_Type="text/plain").connected(kubeconfig) as cluster:
        for call in (cluster.get(CONFIG_MAP, KEY), cluster.delete(CONFIG_MAP, KEY, uid="u-1")):
            with pytest.raises(NotFoundError) as unserved:
                await call
            assert unserved.value.reason == "KindNotServed"
    gone = status_body(404, "NotFound", name="team-a", kind="namespaces")
    async with answering(404, gone).connected(kubeconfig) as cluster:
        with pytest.raises(NotFoundError) as homeless:
            await cluster.create(CONFIG_MAP, OBJECT)
    assert homeless.value.reason == "NamespaceNotFound"


async def test_a_dying_namespace_and_a_future_version_have_reasons_of_their_own(kubeconfig: Path) -> None:
    """NamespaceTerminating is distinguished from other 403s; a version beyond the server's newest means: list again."""
    dying = status_body(403, "Forbidden", causes=[{"reason": "NamespaceTerminating", "field": "metadata.namespace"}])
    async with answering(403, dying).connected(kubeconfig) as cluster:
        with pytest.raises(ForbiddenError) as forbidden:
            await cluster.create(CONFIG_MAP, OBJECT)
    assert forbidden.value.reason == "NamespaceTerminating"
    future = status_body(504, "Timeout", causes=[{"reason": "ResourceVersionTooLarge", "message": "Too large"}])
    async with answering(504, future).connected(kubeconfig) as cluster:
        with pytest.raises(GoneError):
            await anext(cluster.list(CONFIG_MAP, resource_version="99"))


@pytest.mark.parametrize(
    "body", [b"", b"{", b"[]", b"null", b"{}", b'{"metadata":{}}', HTML, b'{"kind":"Status"}'], ids=repr
)
async def test_a_success_that_is_no_object_is_undecodable(kubeconfig: Path, body: bytes) -> None:
    """200 with a body that is not the object (a proxy's page, half an object) is UndecodableError, for lists too."""
    async with answering(200, body).connected(kubeconfig) as cluster:
        with pytest.raises(UndecodableError):
            await cluster.get(CONFIG_MAP, KEY)
        with pytest.raises(UndecodableError):
            await anext(cluster.list(CONFIG_MAP))


async def test_an_error_about_an_unsendable_request_shows_no_header(kubeconfig: Path) -> None:
    """The HTTP library may quote an illegal request, credentials included, so the error shows only its type."""

    def refuse(_: httpx2.Request) -> httpx2.Response:
        raise httpx2.LocalProtocolError("Illegal header value b'Bearer s3cret\\n'")

    async with Scripted(refuse).connected(kubeconfig) as cluster:
        with pytest.raises(TransientError, match="LocalProtocolError") as failed:
            await cluster.get(CONFIG_MAP, KEY)
    assert "s3cret" not in "".join(traceback.format_exception(failed.value))


@pytest.mark.parametrize(
    "failure",
    [
        httpx2.ConnectError(""),
        httpx2.ConnectTimeout(""),
        httpx2.PoolTimeout(""),
        httpx2.ReadError(""),
        httpx2.ReadTimeout(""),
        httpx2.RemoteProtocolError("Server disconnected"),
        httpx2.WriteError(""),
        httpx2.DecodingError("bad gzip"),
        ssl.SSLError(1, "[SSL: WRONG_VERSION_NUMBER] wrong version number"),
    ],
    ids=repr,
)
async def test_every_failure_on_the_way_is_transient(kubeconfig: Path, failure: Exception) -> None:
    """No exception of the HTTP library or of TLS gets out, and each becomes one sentence that says something."""

    def fail(_: httpx2.Request) -> httpx2.Response:
        raise failure

    async with Scripted(fail).connected(kubeconfig) as cluster:
        for call in (cluster.get(CONFIG_MAP, KEY), delivered(cluster), anext(cluster.list(CONFIG_MAP))):
            with pytest.raises(TransientError) as lost:
                await call
            assert type(lost.value) is TransientError
            assert lost.value.kind == CONFIG_MAP
            assert not lost.value.message.endswith(": ")


async def test_a_server_that_never_answers_is_given_up(kubeconfig: Path) -> None:
    """The whole request is bounded, even where no single read is slow."""

    async def hang(_: httpx2.Request) -> httpx2.Response:
        await anyio.sleep_forever()
        raise AssertionError

    async with Scripted(hang).connected(kubeconfig, request_timeout_s=0.01) as cluster:
        for call in (cluster.get(CONFIG_MAP, KEY), delivered(cluster)):
            with pytest.raises(TransientError, match=r"0\.01 s"):
                await call


async def test_a_write_has_a_bound_of_its_own(kubeconfig: Path) -> None:
    """The API server may take longer for a write than for a read, and a write given up early is never carried out."""
    asked_s: list[float] = []

    async def answer(request: httpx2.Request) -> httpx2.Response:
        asked_s.append(request.extensions["timeout"]["read"])
        await anyio.sleep(0.1)
        return httpx2.Response(200, json={"metadata": {"resourceVersion": "1"}})

    async with Scripted(answer).connected(kubeconfig, request_timeout_s=0.01, write_timeout_s=30) as cluster:
        await cluster.merge_patch(CONFIG_MAP, KEY, {})
        with pytest.raises(TransientError, match=r"0\.01 s"):
            await cluster.get(CONFIG_MAP, KEY)
    assert asked_s == [30, 0.01]


async def test_nothing_is_tried_twice(kubeconfig: Path) -> None:
    """A failed request is one request."""
    server = answering(503, b"")
    async with server.connected(kubeconfig) as cluster:
        with pytest.raises(TransientError):
            await cluster.apply(CONFIG_MAP, OBJECT, force=True)
    assert len(server.requests) == 1


async def test_observers_are_called_with_and_without_a_response(kubeconfig: Path) -> None:
    """The status is None when no answer came."""
    told: list[tuple[Request, int | None]] = []

    def sometimes(request: httpx2.Request) -> httpx2.Response:
        if request.method == "GET":
            raise httpx2.ReadError("gone")
        return httpx2.Response(201, json=OBJECT)

    async with Scripted(sometimes).connected(
        kubeconfig, observe=lambda request, status, _: told.append((request, status))
    ) as cluster:
        await cluster.apply(CONFIG_MAP, OBJECT, force=True)
        with pytest.raises(TransientError):
            await cluster.get(CONFIG_MAP, KEY)
    assert told == [(Request("apply", CONFIG_MAP, KEY), 201), (Request("get", CONFIG_MAP, KEY), None)]


# --- lists ---------------------------------------------------------------------------------------------------------


async def test_a_list_walks_its_pages(kubeconfig: Path) -> None:
    """Each page is asked for with the token of the one before; objects get their apiVersion and kind."""

    def pages(request: httpx2.Request) -> httpx2.Response:
        more = "" if "continue" in request.url.params else "token"
        item = {"metadata": {"name": f"after-{request.url.params.get('continue', 'start')}"}}
        return httpx2.Response(200, json={"metadata": {"resourceVersion": "9", "continue": more}, "items": [item]})

    server = Scripted(pages)
    async with server.connected(kubeconfig) as cluster:
        found = [page async for page in cluster.list(DEPLOYMENT, labels="a=b", page_size=1)]
    assert [(page.items[0]["metadata"]["name"], page.last) for page in found] == [
        ("after-start", False),
        ("after-token", True),
    ]
    assert {(item["apiVersion"], item["kind"]) for page in found for item in page.items} == {("apps/v1", "Deployment")}
    assert [dict(request.url.params) for request in server.requests] == [
        {"labelSelector": "a=b", "limit": "1"},
        {"labelSelector": "a=b", "limit": "1", "continue": "token"},
    ]
    assert {request.url.path for request in server.requests} == {"/apis/apps/v1/deployments"}


class Weights:
    """A server whose list has objects of these sizes in bytes; it records each page that was asked for."""

    def __init__(self, *sizes: int) -> None:
        self.sizes = sizes
        self.asked: list[tuple[int, int]] = []
        self.delivered_bytes: list[int] = []

    def __call__(self, request: httpx2.Request) -> httpx2.Response:
        """A page, in pieces as a connection delivers them."""
        begin, limit = int(request.url.params.get("continue", 0)), int(request.url.params["limit"])
        self.asked.append((begin, limit))
        end = min(begin + limit, len(self.sizes))
        items = [
            {"metadata": {"name": f"n{n}", "resourceVersion": "1"}, "x": "x" * self.sizes[n]} for n in range(begin, end)
        ]
        more = "" if end == len(self.sizes) else str(end)
        body = json.dumps({"metadata": {"resourceVersion": "9", "continue": more}, "items": items}).encode()
        self.delivered_bytes.append(len(body))
        return httpx2.Response(200, stream=Stream(*(body[at : at + 65_536] for at in range(0, len(body), 65_536))))


async def pages_of(kubeconfig: Path, weights: Weights) -> list[list[str]]:
    """The names on each page of a list."""
    async with Scripted(weights).connected(kubeconfig) as cluster:
        return [[item["metadata"]["name"] for item in page.items] async for page in cluster.list(CONFIG_MAP)]


async def test_pages_grow_to_what_they_are_to_weigh(kubeconfig: Path) -> None:
    """Small objects come in ever larger pages of at most 500; each object comes once, in order."""
    weights = Weights(*[1_000] * 1_200)
    pages = await pages_of(kubeconfig, weights)
    assert [name for page in pages for name in page] == [f"n{n}" for n in range(1_200)]
    assert [limit for _, limit in weights.asked] == [50, 200, 500, 500]


async def test_a_page_of_large_objects_is_abandoned_and_asked_for_again(kubeconfig: Path) -> None:
    """After many small objects come large ones: no page above the bound is kept, and every object comes once."""
    weights = Weights(*[100] * 250, *[900_000] * 6, *[100] * 10)
    pages = await pages_of(kubeconfig, weights)
    assert [name for page in pages for name in page] == [f"n{n}" for n in range(266)]
    kept = {begin: delivered for (begin, _), delivered in zip(weights.asked, weights.delivered_bytes, strict=True)}
    assert max(kept.values()) <= MAX_PAGE_BYTES
    assert max(weights.delivered_bytes) > MAX_PAGE_BYTES, "nothing was abandoned"


async def test_one_object_is_taken_whatever_it_weighs(kubeconfig: Path) -> None:
    """A page of one object is never abandoned, or the list would never end."""
    assert await pages_of(kubeconfig, Weights(3 * MAX_PAGE_BYTES, 10)) == [["n0"], ["n1"]]


async def test_a_list_waits_until_another_has_handed_its_page_on(kubeconfig: Path) -> None:
    """At most ``PAGES_AT_ONCE`` pages exist; Leases don't wait, or a burst of lists would cost the shards."""
    weights = Weights(*[10] * 200)
    async with Scripted(weights).connected(kubeconfig) as cluster:
        lists = [cluster.list(CONFIG_MAP) for _ in range(PAGES_AT_ONCE)]
        for each in lists:
            await anext(each)
        waiting = cluster.list(CONFIG_MAP)
        with anyio.move_on_after(0) as tried:
            await anext(waiting)
        assert tried.cancelled_caught
        assert (await anext(cluster.list(LEASE))).items
        for each in lists:
            await each.aclose()
        assert (await anext(cluster.list(CONFIG_MAP))).items


async def test_an_item_that_is_no_object_is_undecodable(kubeconfig: Path) -> None:
    """Items are decoded when they are asked for, and one that is no object is an error then."""
    body = {"metadata": {"resourceVersion": "9"}, "items": [{"metadata": {"name": "a", "resourceVersion": "1"}}, 5]}
    async with answering(200, body).connected(kubeconfig) as cluster:
        (page,) = [page async for page in cluster.list(CONFIG_MAP)]
    for read in (lambda: page.items, lambda: list(page.batches(1)), lambda: list(page.versions())):
        with pytest.raises(UndecodableError):
            read()


async def test_a_page_is_decoded_in_batches(kubeconfig: Path) -> None:
    """A batch has at most so many bytes, or one object; the last one is marked; addresses need no decoding."""
    async with Scripted(Weights(10, 10, 5_000, 10)).connected(kubeconfig) as cluster:
        (page,) = [page async for page in cluster.list(CONFIG_MAP)]
    found = [([obj["metadata"]["name"] for obj in objects], is_end) for objects, is_end in page.batches(200)]
    assert found == [(["n0", "n1"], False), (["n2"], False), (["n3"], True)]
    assert list(page.versions()) == [(Key("", f"n{n}"), 1) for n in range(4)]


async def test_a_list_with_a_version_has_no_limit(kubeconfig: Path) -> None:
    """ResourceVersion and limit are not combined, and an empty (null) list is a page."""
    server = answering(200, {"metadata": {"resourceVersion": "9"}, "items": None})
    async with server.connected(kubeconfig) as cluster:
        (page,) = [page async for page in cluster.list(CONFIG_MAP, namespace="team-a", resource_version="0")]
    assert (page.items, page.last) == ([], True)
    assert dict(server.requests[0].url.params) == {"resourceVersion": "0"}
    assert server.requests[0].url.path == "/api/v1/namespaces/team-a/configmaps"


# --- watches -------------------------------------------------------------------------------------------------------


class Stream(httpx2.AsyncByteStream):
    """A body that comes in these pieces; an exception in their place is raised, None means silence for ever."""

    def __init__(self, *pieces: bytes | Exception | None) -> None:
        self._pieces = pieces
        self.is_closed = False

    async def __aiter__(self) -> AsyncIterator[bytes]:
        for piece in self._pieces:
            if piece is None:
                await anyio.sleep_forever()
            elif isinstance(piece, Exception):
                raise piece
            else:
                yield piece

    async def aclose(self) -> None:
        """What the client must call in the end."""
        self.is_closed = True


def line(type_: str, version: str = "8", name: str = "checkout", **rest: Any) -> bytes:
    """One line of a watch."""
    obj = {"metadata": {"name": name, "resourceVersion": version}, **rest}
    return json.dumps({"type": type_, "object": obj}, ensure_ascii=False).encode() + b"\n"


async def delivered(
    cluster: Cluster, *, idle_timeout_s: float = 5, into: list[WatchEvent] | None = None
) -> list[WatchEvent]:
    """Everything that one watch delivers."""
    events = [] if into is None else into
    async with cluster.watch(CONFIG_MAP, resource_version="7", timeout_s=300, idle_timeout_s=idle_timeout_s) as stream:
        async for event in stream:
            events.append(event)
    return events


def streaming(*pieces: bytes | Exception | None) -> tuple[Scripted, Stream]:
    """A server whose watch is these pieces."""
    stream = Stream(*pieces)
    return Scripted(lambda _: httpx2.Response(200, stream=stream)), stream


async def test_a_watch_asks_for_bookmarks_from_a_version(kubeconfig: Path) -> None:
    """The request names the version, the server's own deadline, and wants bookmarks."""
    server, stream = streaming()
    async with server.connected(kubeconfig) as cluster:
        assert await delivered(cluster) == []
    assert dict(server.requests[0].url.params) == {
        "watch": "true",
        "resourceVersion": "7",
        "allowWatchBookmarks": "true",
        "timeoutSeconds": "300",
    }
    assert stream.is_closed


@pytest.mark.parametrize("size", [1, 2, 7, 64, 10_000])
async def test_lines_end_at_newline_bytes_only(kubeconfig: Path, size: int) -> None:
    """However the bytes are cut, and whatever separators JSON strings hold, each line is one event."""
    odd = "\u0085 \u2028 \u2029 \x0b \x0c \r é"
    wire = line("ADDED", "8", data={"k": odd}) + b"\n" + line("MODIFIED", "9") + line("DELETED", "10")
    server, _ = streaming(*(wire[at : at + size] for at in range(0, len(wire), size)))
    async with server.connected(kubeconfig) as cluster:
        events = await delivered(cluster)
    assert [(event.type, event.resource_version) for event in events] == [
        ("ADDED", "8"),
        ("MODIFIED", "9"),
        ("DELETED", "10"),
    ]
    assert events[0].object["data"] == {"k": odd}


async def test_a_bookmark_is_its_metadata(kubeconfig: Path) -> None:
    """Whatever else a bookmark's object holds is not looked at."""
    server, _ = streaming(line("BOOKMARK", "12", spec={"half": "an object"}))
    async with server.connected(kubeconfig) as cluster:
        (event,) = await delivered(cluster)
    assert (event.type, event.resource_version) == ("BOOKMARK", "12")
    assert sorted(event.object) == ["apiVersion", "kind", "metadata"]


@pytest.mark.parametrize(
    ("tail", "expected"),
    [
        ((b'{"type":"ADDED","object":{"metadata"',), UndecodableError),
        ((line("ADDED").rstrip(b"\n"),), UndecodableError),
        ((b"<html>\n",), UndecodableError),
        ((b'{"type":"ADDED","object":"\xff"}\n',), UndecodableError),
        ((b'{"type":"ADDED","object":[]}\n',), UndecodableError),
        ((b'{"type":"ADDED","object":{"metadata":{}}}\n',), UndecodableError),
        ((b'{"type":"RENAMED","object":{"metadata":{"resourceVersion":"9"}}}\n',), UndecodableError),
        ((b'{"type":"BOOKMARK","object":{"metadata":{}}}\n',), UndecodableError),
        ((json.dumps({"type": "ERROR", "object": status_body(410, "Expired")}).encode() + b"\n",), GoneError),
        (
            (json.dumps({"type": "ERROR", "object": status_body(500, "InternalError")}).encode() + b"\n",),
            TransientError,
        ),
        ((json.dumps({"type": "ERROR", "object": {}}).encode() + b"\n",), TransientError),
        (
            (
                json.dumps({"type": "ERROR", "object": status_body(403, "Forbidden", kind="configmaps")}).encode()
                + b"\n",
            ),
            ForbiddenError,
        ),
        ((httpx2.ReadError(""),), TransientError),
        ((ssl.SSLError(1, "[SSL] bad record mac"),), TransientError),
        ((httpx2.RemoteProtocolError("incomplete chunked read"),), TransientError),
        ((None,), TransientError),
        ((b'{"type":"ADD', None), TransientError),
    ],
    ids=str,
)
async def test_what_came_before_a_break_is_delivered(
    kubeconfig: Path, tail: tuple[bytes | Exception | None, ...], expected: type[OperatorError]
) -> None:
    """However a stream breaks, the whole events before it arrive, the error is ours, and the connection is closed."""
    server, stream = streaming(line("ADDED", "8") + line("MODIFIED", "9"), *tail)
    events: list[WatchEvent] = []
    async with server.connected(kubeconfig) as cluster:
        with pytest.raises(OperatorError) as broken:
            await delivered(cluster, idle_timeout_s=0.01, into=events)
    assert type(broken.value) is expected
    assert [event.resource_version for event in events] == ["8", "9"]
    assert stream.is_closed


async def test_leaving_a_watch_closes_it(kubeconfig: Path) -> None:
    """Leaving before the first event, leaving early, and being cancelled all close the connection."""
    server, stream = streaming(line("ADDED"), None)
    async with server.connected(kubeconfig) as cluster:
        async with cluster.watch(CONFIG_MAP, resource_version="7", timeout_s=9, idle_timeout_s=9):
            pass
        assert stream.is_closed
    server, stream = streaming(line("ADDED"), None)
    async with server.connected(kubeconfig) as cluster:
        async with cluster.watch(CONFIG_MAP, resource_version="7", timeout_s=9, idle_timeout_s=9) as events:
            await anext(events)
        assert stream.is_closed
    server, stream = streaming(line("ADDED"), None)
    async with server.connected(kubeconfig) as cluster:
        with anyio.CancelScope() as scope:
            async with cluster.watch(CONFIG_MAP, resource_version="7", timeout_s=9, idle_timeout_s=9) as events:
                await anext(events)
                scope.cancel()
                await anext(events)
        assert scope.cancelled_caught
        assert stream.is_closed


async def test_a_cancelled_request_hangs_up(tmp_path: Path) -> None:
    """On a real socket: cancelling a request or a watch closes its connection, so the server sees the end of it."""
    seen_end = anyio.Event()

    async def serve(connection: anyio.abc.SocketStream) -> None:
        async with connection:
            await connection.receive()
            await connection.send(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
            with pytest.raises(anyio.EndOfStream):
                await connection.receive()
            seen_end.set()

    listener = await anyio.create_tcp_listener(local_host="127.0.0.1")
    port = listener.extra_attributes[anyio.abc.SocketAttribute.local_port]()
    kubeconfig = kubeconfig_in(tmp_path, {"server": f"http://127.0.0.1:{port}"})
    async with listener, anyio.create_task_group() as tasks:
        tasks.start_soon(listener.serve, serve)
        async with Cluster.connect(kubeconfig=kubeconfig, user_agent="test/1") as cluster:
            with anyio.CancelScope() as scope:
                async with cluster.watch(CONFIG_MAP, resource_version="7", timeout_s=9, idle_timeout_s=9) as events:
                    tasks.start_soon(cancel_soon, scope)
                    await anext(events)
            with anyio.fail_after(60):
                await seen_end.wait()
        tasks.cancel_scope.cancel()


async def cancel_soon(scope: anyio.CancelScope) -> None:
    """Cancel once the others wait."""
    await anyio.wait_all_tasks_blocked()
    scope.cancel()
