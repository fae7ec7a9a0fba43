"""The routes of an HTTP listener: which requests they take, and what becomes of them. Pure."""

from enum import IntEnum, StrEnum
from typing import Annotated, Any, ClassVar, Final

from pydantic import Field

from operator_app.api.fields import (
    Cidr,
    DnsLabel,
    DnsName,
    HeaderName,
    HeaderValue,
    Int32,
    LongDuration,
    NewPath,
    Port,
    QueryText,
    RequestHost,
    UrlPath,
    duration_s,
)
from operator_app.api.rules import ApiModel, MapBy, Rule


class Method(StrEnum):
    """Methods that a route can ask for."""

    GET = "GET"
    HEAD = "HEAD"
    POST = "POST"
    PUT = "PUT"
    PATCH = "PATCH"
    DELETE = "DELETE"
    OPTIONS = "OPTIONS"


class HeaderMatch(ApiModel):
    """A header that a request must have."""

    name: HeaderName
    """Name of the header, for example x-canary. For the host there is match.hosts."""

    value: Annotated[HeaderValue, Field(max_length=128)] | None = None
    """The whole value that it must have, at most 128 characters. Left out: any value."""


class QueryMatch(ApiModel):
    """A query parameter that a request must have."""

    name: QueryText
    """Name of the parameter, for example version."""

    value: QueryText | None = None
    """The whole value that it must have. Left out: any value."""


class RouteMatch(ApiModel):
    """Which requests a route takes: those that fit all of what is written here. An empty match takes all."""

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            cel="!(has(self.pathPrefix) && has(self.pathExact))",
            message="must have one of pathPrefix and pathExact, not both: remove one, or write two routes",
            is_valid=lambda match: match.path_prefix is None or match.path_exact is None,
        ),
    )

    hosts: Annotated[tuple[RequestHost, ...], Field(max_length=16)] = ()
    """Names that the request's Host header may have, without port, for example shop.example.com. The label * in front
    stands for one or more labels: *.example.com takes a.example.com and a.b.example.com, but not example.com. Left
    out: every host. At most 16."""

    path_prefix: UrlPath | None = None
    """Takes this path and every path below it: /api takes /api and /api/v1, but not /apiary. At most 1024 characters.
    Left out together with pathExact: every path."""

    path_exact: UrlPath | None = None
    """Takes this path alone, for example /healthz. Query and fragment of the request do not count. At most 1024
    characters."""

    method: Method | None = None
    """Takes requests with this method. Left out: with every method."""

    headers: Annotated[tuple[HeaderMatch, ...], Field(max_length=8), MapBy("name")] = ()
    """Headers that the request must have, all of them, at most 8."""

    query_params: Annotated[tuple[QueryMatch, ...], Field(max_length=8), MapBy("name")] = ()
    """Query parameters that the request must have, all of them, at most 8."""


class WeightedBackend(ApiModel):
    """One of several backends that share the requests of a route."""

    name: DnsLabel
    """Name of the entry of spec.backends, for example app-v2."""

    weight: Annotated[Int32, Field(ge=0, le=10_000)] = 1
    """Share of the requests in proportion to the other entries, 0 to 10000; with 99 and 1, one of a hundred goes to the
    second. 0 takes none. Left out: 1."""


class RetryOn(StrEnum):
    """What a request is tried again after."""

    CONNECTION = "connection"
    GATEWAY_ERROR = "gateway-error"
    SERVER_ERROR = "server-error"


class Retries(ApiModel):
    """Tries a failed request again. What was sent with POST or PATCH is tried again only where nothing was sent yet."""

    attempts: Annotated[Int32, Field(ge=1, le=5)] = 1
    """How often a request is tried again, 1 to 5. Left out: once."""

    after: Annotated[tuple[RetryOn, ...], Field(max_length=3)] = ()
    """After what it is tried again: connection, the backend could not be reached or closed the connection without a
    response; gateway-error, it responded 502, 503 or 504; server-error, it responded any 5xx. A perTryTimeout counts as
    both errors. Left out: connection and gateway-error."""

    per_try_timeout: LongDuration | None = None
    """How long each try may take: a whole number of ms, s or m up to 60m, for example 2s. Left out: as long as
    timeout allows."""


class RedirectStatus(IntEnum):
    """Statuses of a redirect."""

    MOVED_PERMANENTLY = 301
    FOUND = 302
    SEE_OTHER = 303
    TEMPORARY_REDIRECT = 307
    PERMANENT_REDIRECT = 308


class Scheme(StrEnum):
    """Schemes of a redirect."""

    HTTP = "http"
    HTTPS = "https"


class Redirect(ApiModel):
    """Answers with a redirect to another place; what is left out stays as requested."""

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            cel="!(has(self.path) && has(self.prefix))",
            message="must have one of path and prefix, not both: path replaces the whole path, prefix its beginning",
            is_valid=lambda redirect: redirect.path is None or redirect.prefix is None,
        ),
        Rule(
            cel="has(self.scheme) || has(self.host) || has(self.port) || has(self.path) || has(self.prefix)",
            message="must change something, or it would lead to itself: set scheme, host, port, path or prefix",
            is_valid=lambda redirect: any(
                each is not None
                for each in (redirect.scheme, redirect.host, redirect.port, redirect.path, redirect.prefix)
            ),
        ),
    )

    scheme: Scheme | None = None
    """http or https."""

    host: DnsName | None = None
    """Another host, for example www.example.com."""

    port: Port | None = None
    """Another port, 1 to 65535. Left out: the scheme's own."""

    path: NewPath | None = None
    """Replaces the whole path, for example /new. At most 256 characters."""

    prefix: NewPath | None = None
    """Replaces match.pathPrefix at the beginning of the path, for example /v2. At most 256 characters."""

    status: RedirectStatus = RedirectStatus.FOUND
    """301, 302, 303, 307 or 308; the last two keep method and body. Left out: 302."""


class FixedResponse(ApiModel):
    """Answers without a backend."""

    status: Annotated[Int32, Field(ge=200, le=599)]
    """Status of the response, 200 to 599, for example 503."""

    body: Annotated[str, Field(max_length=1024)] = ""
    """Text of the response, at most 1024 characters. Left out: none."""

    content_type: Annotated[HeaderValue, Field(max_length=64)] = "text/plain"
    """Type of the text, for example text/html. Left out: text/plain."""


_NOT_CHANGEABLE: Final = (
    "host",
    "connection",
    "content-length",
    "keep-alive",
    "proxy-connection",
    "te",
    "trailer",
    "transfer-encoding",
    "upgrade",
)
"""Headers that say where a message goes or where it ends. A change of them would contradict the message."""

ChangedName = Annotated[
    HeaderName,
    Rule(
        cel=f"!(self in {list(_NOT_CHANGEABLE)}) && !self.startsWith('x-envoy-')",
        message="must not be a header that says where a message goes or ends, nor one of Envoy's own (x-envoy-): use "
        "hostRewrite for the host, and timeout and retries of the route for Envoy's",
        is_valid=lambda value: value not in _NOT_CHANGEABLE and not value.startswith("x-envoy-"),
    ),
]


class Header(ApiModel):
    """A header with its value."""

    name: ChangedName
    """Name of the header, for example x-team."""

    value: HeaderValue
    """Its value, sent as it is written here: percent signs and braces mean nothing. At most 256 characters."""


Headers = Annotated[tuple[Header, ...], Field(max_length=8), MapBy("name")]


class HeaderChanges(ApiModel):
    """Headers that are set, added and removed, in this order."""

    set: Headers = ()
    """Headers that have this value afterwards, whether or not they were there. At most 8."""

    add: Headers = ()
    """Headers that are added beside those of the same name. At most 8."""

    remove: Annotated[tuple[ChangedName, ...], Field(max_length=8)] = ()
    """Names of headers that are removed. At most 8."""


class Mirror(ApiModel):
    """Sends a copy of requests to a second backend, whose responses nobody waits for."""

    backend: DnsLabel
    """Name of the entry of spec.backends that gets the copies, for example app-next."""

    percent: Annotated[Int32, Field(ge=1, le=100)] = 100
    """How many of a hundred requests are copied, 1 to 100. Left out: 100."""


class RateUnit(StrEnum):
    """Length of time that a rate is about."""

    SECOND = "second"
    MINUTE = "minute"
    HOUR = "hour"

    @property
    def seconds(self) -> int:
        """The unit in seconds."""
        return {RateUnit.SECOND: 1, RateUnit.MINUTE: 60, RateUnit.HOUR: 3600}[self]


class RateLimit(ApiModel):
    """Answers 429 to requests beyond a rate. Each proxy counts for itself, so n replicas let n times as many pass."""

    requests: Annotated[Int32, Field(ge=1, le=1_000_000)]
    """Requests that pass in each unit of time, 1 to 1000000."""

    per: RateUnit = RateUnit.SECOND
    """The unit of time: second, minute or hour. Left out: second."""

    burst: Annotated[Int32, Field(ge=1, le=1_000_000)] | None = None
    """Requests that may come at once after a pause, 1 to 1000000. Left out: as many as requests."""


class Cors(ApiModel):
    """Lets scripts of other origins call the route (CORS). Preflight requests are answered by the proxy."""

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            cel="!has(self.credentials) || !self.credentials || !('*' in self.origins)",
            message="credentials for the origin * would let every site act as the user: name the origins, or remove "
            "credentials",
            is_valid=lambda cors: not cors.credentials or "*" not in cors.origins,
        ),
    )

    origins: Annotated[tuple[Annotated[HeaderValue, Field(max_length=128)], ...], Field(min_length=1, max_length=8)]
    """Origins that may call, for example https://shop.example.com, or * for all, 1 to 8. Compared as a whole."""

    methods: Annotated[tuple[Method, ...], Field(max_length=7)] = ()
    """Methods that they may use. Left out: GET, HEAD and POST."""

    headers: Annotated[tuple[HeaderName, ...], Field(max_length=8)] = ()
    """Headers that they may send beside the harmless ones, at most 8."""

    expose_headers: Annotated[tuple[HeaderName, ...], Field(max_length=8)] = ()
    """Headers of responses that they may read beside the harmless ones, at most 8."""

    max_age: LongDuration | None = None
    """How long browsers may remember the answer to a preflight, for example 10m. Left out: as browsers do."""

    credentials: Annotated[bool, Field(strict=True)] = False
    """Whether they may send cookies and read what comes back. Left out: false."""


class Access(ApiModel):
    """Which clients may use the route, by the address that the proxy trusts (listeners.trustedHops). Others: 403."""

    allow: Annotated[tuple[Cidr, ...], Field(max_length=16)] = ()
    """Clients with these addresses alone, for example 203.0.113.0/24, at most 16. Left out: all."""

    deny: Annotated[tuple[Cidr, ...], Field(max_length=16)] = ()
    """Not these, even where allow has them, at most 16."""


_ANSWERS: Final = ("backend", "backends", "redirect", "response")
_FORWARDING: Final = ("timeout", "idleTimeout", "retries", "prefixRewrite", "hostRewrite", "mirror")


def _has(*members: str) -> str:
    return " || ".join(f"has(self.{each})" for each in members)


def _text(holder: str, member: str, item: str) -> str:
    """CEL: the characters of all items of a list that may be absent."""
    return f"(has({holder}.{member}) ? {holder}.{member}.map(t, {item}).sum() : 0)"


_VALUES: Final = "t.name.size() + t.value.size()"
_PAIR: Final = "t.name.size() + (has(t.value) ? t.value.size() : 0)"


def _optional(holder: str, *parts: str) -> str:
    return f"(has({holder}) ? {' + '.join(parts)} : 0)"


def _size(path: str) -> str:
    return f"(has({path}) ? {path}.size() : 0)"


TEXT: Final = " + ".join(
    (
        _optional(
            "r.match",
            _size("r.match.pathPrefix"),
            _size("r.match.pathExact"),
            _text("r.match", "hosts", "t.size()"),
            _text("r.match", "headers", _PAIR),
            _text("r.match", "queryParams", _PAIR),
        ),
        *(
            _optional(
                f"r.{changes}",
                *(_text(f"r.{changes}", each, "t.name.size() + t.value.size()") for each in ("set", "add")),
            )
            for changes in ("requestHeaders", "responseHeaders")
        ),
        _optional("r.response", _size("r.response.body")),
        _optional("r.redirect", _size("r.redirect.path"), _size("r.redirect.prefix")),
        _size("r.prefixRewrite"),
    )
)
"""CEL: ``Route.text_length`` of the route ``r``."""


class Route(ApiModel):
    """One rule of a listener: what it matches and what becomes of it."""

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            cel=f"[{', '.join(f'has(self.{each})' for each in _ANSWERS)}].filter(each, each).size() == 1",
            message="must have one answer: backend, backends, redirect or response",
            is_valid=lambda route: (
                sum(each is not None for each in (route.backend, route.backends, route.redirect, route.response)) == 1
            ),
        ),
        Rule(
            cel=f"has(self.backend) || has(self.backends) || !({_has(*_FORWARDING)})",
            message="a redirect and a fixed response have no backend: remove timeout, idleTimeout, retries, "
            "prefixRewrite, hostRewrite and mirror",
            is_valid=lambda route: (
                route.backend is not None
                or route.backends is not None
                or not any(
                    each is not None
                    for each in (
                        route.timeout,
                        route.idle_timeout,
                        route.retries,
                        route.prefix_rewrite,
                        route.host_rewrite,
                        route.mirror,
                    )
                )
            ),
        ),
        Rule(
            cel="!has(self.prefixRewrite) && !(has(self.redirect) && has(self.redirect.prefix)) || "
            "(has(self.match) && has(self.match.pathPrefix))",
            message="prefixRewrite and redirect.prefix replace match.pathPrefix: add it, for example /",
            is_valid=lambda route: (
                (route.prefix_rewrite is None and (route.redirect is None or route.redirect.prefix is None))
                or (route.match is not None and route.match.path_prefix is not None)
            ),
        ),
        Rule(
            cel="!(has(self.timeout) && has(self.retries) && has(self.retries.perTryTimeout)) || "
            "duration(self.retries.perTryTimeout) <= duration(self.timeout)",
            message="perTryTimeout must not be above timeout, which is for all tries together: lower it, or raise "
            "timeout",
            is_valid=lambda route: (
                route.timeout is None
                or route.retries is None
                or route.retries.per_try_timeout is None
                or duration_s(route.retries.per_try_timeout) <= duration_s(route.timeout)
            ),
        ),
        Rule(
            cel="!has(self.cors) || !has(self.match) || !has(self.match.headers)",
            message="a preflight request has none of the headers that match asks for, so CORS would never be granted: "
            "remove match.headers, or give cors to a route without",
            is_valid=lambda route: route.cors is None or route.match is None or not route.match.headers,
        ),
    )

    match: RouteMatch | None = None
    """Which requests the route takes. Left out: all. Not available on a TCP listener, where a connection has neither
    host nor path."""

    backend: DnsLabel | None = None
    """Name of the entry of spec.backends that answers, for example app. One of backend, backends, redirect and
    response is needed."""

    backends: (
        Annotated[
            tuple[WeightedBackend, ...],
            Field(min_length=1, max_length=8),
            MapBy("name"),
            Rule(
                cel="self.exists(each, !has(each.weight) || each.weight > 0)",
                message="one of the backends must have a weight above 0: raise one",
                is_valid=lambda backends: any(each.weight > 0 for each in backends),
            ),
        ]
        | None
    ) = None
    """Backends that share the requests by weight, for example for a canary, 1 to 8."""

    redirect: Redirect | None = None
    """Answers with a redirect."""

    response: FixedResponse | None = None
    """Answers with a fixed response."""

    timeout: LongDuration | None = None
    """How long the whole response may take, with all retries: a whole number of ms, s or m up to 60m, for example 15s.
    A WebSocket that is open is not cut. Left out: as long as it takes."""

    idle_timeout: LongDuration | None = None
    """How long a request, a response or a WebSocket may stand still, for example 30m. Left out: 300s."""

    retries: Retries | None = None
    """Tries failed requests again. Left out: up to three times, for GET and HEAD, where the connection
    failed."""

    prefix_rewrite: NewPath | None = None
    """Replaces match.pathPrefix at the beginning of the path: with /api and /, /api/v1 becomes /v1. At most 256
    characters."""

    host_rewrite: DnsName | None = None
    """Host that the backend sees, for example app.internal.example. Left out: the requested one."""

    request_headers: HeaderChanges | None = None
    """Changes of the headers that the backend sees."""

    response_headers: HeaderChanges | None = None
    """Changes of the headers that the client sees."""

    mirror: Mirror | None = None
    """Sends copies to a second backend."""

    rate_limit: RateLimit | None = None
    """Limits how many requests pass."""

    cors: Cors | None = None
    """Lets scripts of other origins call a backend. A redirect and a fixed response are not granted to them."""

    access: Access | None = None
    """Limits which clients may use the route."""

    @property
    def backend_names(self) -> tuple[str, ...]:
        """Every backend that it names."""
        names = [each.name for each in self.backends or ()]
        names += [each for each in (self.backend, self.mirror.backend if self.mirror else None) if each is not None]
        return tuple(names)

    @property
    def hosts(self) -> tuple[str, ...]:
        """The hosts that it is for; none means every host."""
        return self.match.hosts if self.match else ()

    @property
    def is_plain(self) -> bool:
        """Whether it has a backend and nothing else."""
        return (
            all(getattr(self, name) in (None, ()) for name in type(self).model_fields if name != "backend")
            and self.backend is not None
        )

    @property
    def text_length(self) -> int:
        """Characters of what is free text in it: hosts, paths, headers, bodies."""
        match = self.match or RouteMatch()
        pairs: list[Any] = [*match.headers, *match.query_params]
        for changes in (self.request_headers, self.response_headers):
            pairs += [*changes.set, *changes.add] if changes else []
        redirect = self.redirect or Redirect.model_construct()
        texts = [match.path_prefix, match.path_exact, *match.hosts, redirect.path, redirect.prefix, self.prefix_rewrite]
        texts.append(self.response.body if self.response else None)
        return sum(len(each or "") for each in texts) + sum(len(each.name) + len(each.value or "") for each in pairs)
