"""Envoy's routes: which request of an HTTP listener goes where, and what is changed on the way. Pure.

Route precedence
----------------

Of all routes of an HTTP listener that match a request, the first by this order answers (as Gateway API orders the
matches of an HTTPRoute):

| step | compared | first |
|---|---|---|
| 1 | host | an exact host, then a longer ``*.`` wildcard, then a shorter one, then a route without hosts |
| 2 | path | ``pathExact``, then a longer ``pathPrefix``, then a shorter one, then a route without path |
| 3 | method | a route with ``method``, then one without |
| 4 | headers | more entries of ``headers`` before fewer |
| 5 | query | more entries of ``queryParams`` before fewer |
| 6 | place | the order of declaration |

A request for ``shop.example.com`` that matches none of its own routes can therefore match a route of ``*.example.com``.
Hosts are compared without port, trailing dot and case; ``*.example.com`` matches one or more labels before
``.example.com``, but not ``example.com``. Paths are compared without query, after percent-decoding of unreserved
characters and resolution of ``//``, ``/./`` and ``/../``. ``pathPrefix`` matches whole segments: ``/api`` and ``/api/``
both match ``/api``, ``/api/`` and ``/api/v1``, but not ``/apiary`` (as Gateway API's ``PathPrefix``). Envoy answers a
request that matches no route with 404.

A declared route may need several of Envoy's, which then follow each other: a prefix that is rewritten to ``/`` matches
the prefix itself and what is below it separately, since Envoy would make ``//v1`` of ``/api/v1``; and retries of
methods that may not be repeated are those of requests that were not sent yet.

The filters that routes use are listed in every listener (:func:`filters`), disabled unless a route configures them, so
that no edit of a route changes a listener. The rates of all routes are configured once for all virtual hosts
(:func:`shared_filters`): a rate in each of Envoy's routes would be as many rates.
"""

import json
from collections.abc import Iterator
from ipaddress import ip_network
from typing import Final

from operator_app.api.fields import duration_s
from operator_app.api.routes import (
    Access,
    Cors,
    FixedResponse,
    HeaderChanges,
    Method,
    RateLimit,
    Redirect,
    Retries,
    RetryOn,
    Route,
    RouteMatch,
)
from operator_app.envoy.clusters import cluster_name
from operator_app.envoy.messages import Message, extension, router, typed

_REPEATABLE: Final = (Method.GET, Method.HEAD, Method.PUT, Method.DELETE, Method.OPTIONS)
"""The methods of :class:`Method` that may be sent twice (RFC 9110 section 9.2.2)."""

_UNSENT: Final = "connect-failure,refused-stream,reset-before-request"
"""Failures after which the backend can't have seen the request."""

_RETRY_ON: Final = {
    RetryOn.CONNECTION: "reset",
    RetryOn.GATEWAY_ERROR: "gateway-error",
    RetryOn.SERVER_ERROR: "5xx",
}

_DEFAULT_RETRIES: Final = {
    # A backend may close an idle connection at the moment at which a request is sent there.
    "retry_on": "reset",
    # One try more could meet another connection that the backend has closed at the same moment.
    "num_retries": 3,
    "retriable_request_headers": [
        {"name": ":method", "string_match": {"exact": each.value}} for each in (Method.GET, Method.HEAD)
    ],
}
"""What routes without ``retries`` do. It stands in every virtual host, so it is short."""

_CORS: Final = "envoy.filters.http.cors"
_ACCESS: Final = "envoy.filters.http.rbac"
_RATE_LIMIT: Final = "envoy.filters.http.local_ratelimit"

_RATE: Final = "rate"
"""The key by which a route says which rate its requests take from."""

_UNLIMITED: Final = 2**32 - 1
"""The largest number of requests in a bucket, for each second."""

_REDIRECT_CODES: Final = {
    301: "MOVED_PERMANENTLY",
    302: "FOUND",
    303: "SEE_OTHER",
    307: "TEMPORARY_REDIRECT",
    308: "PERMANENT_REDIRECT",
}


def filters() -> list[Message]:
    """The HTTP filters of every listener. All but the router are off unless the route configures them."""
    optional = [
        extension(_CORS, "filters.http.cors.v3.Cors"),
        extension(_ACCESS, "filters.http.rbac.v3.RBAC"),
        extension(_RATE_LIMIT, "filters.http.local_ratelimit.v3.LocalRateLimit", stat_prefix="route"),
    ]
    return [*(each | {"disabled": True} for each in optional), router()]


def virtual_hosts_bytes(routes: tuple[Route, ...], *, https_only: bool = False) -> int:
    """The length in bytes of :func:`virtual_hosts` as compact JSON in ASCII.

    Computed without building them: a route that several virtual hosts share is encoded once.
    """
    by_rank, sharing = _shared_routes(routes)
    # Each virtual host, and each route, is followed by a comma or by the bracket that closes its list.
    route_bytes = [
        sum(_json_bytes(entry) + 1 for entry in _entries(route, position)) for position, route in enumerate(by_rank)
    ]
    return 1 + sum(
        _json_bytes(_virtual_host(domains, https_only=https_only)) + sum(route_bytes[position] for position in served)
        for served, domains in sharing.items()
    )


def virtual_hosts(routes: tuple[Route, ...], *, https_only: bool = False) -> list[Message]:
    """The virtual hosts of a listener, one for all domains that have the same routes in the same order.

    Virtual hosts that serve the same route contain the same object.
    """
    by_rank, sharing = _shared_routes(routes)
    rendered = [list(_entries(route, position)) for position, route in enumerate(by_rank)]
    return [
        _virtual_host(domains, https_only=https_only)
        | {"routes": [entry for position in served for entry in rendered[position]]}
        for served, domains in sharing.items()
    ]


def shared_filters(routes: tuple[Route, ...]) -> Message:
    """The configuration of filters for all of :func:`virtual_hosts` together, by the filter's name.

    One rate for each route that declares one, whichever of Envoy's routes takes a request for it.
    """
    rates = {str(rank): route.rate_limit for rank, route in enumerate(sorted(routes, key=_rank)) if route.rate_limit}
    return {_RATE_LIMIT: _rate_limits(rates)} if rates else {}


def _virtual_host(domains: list[str], *, https_only: bool) -> Message:
    redirect = {"require_tls": "ALL"} if https_only else {}
    return {"name": domains[0], "domains": domains, "retry_policy": _DEFAULT_RETRIES, "routes": []} | redirect


def _shared_routes(routes: tuple[Route, ...]) -> tuple[list[Route], dict[tuple[int, ...], list[str]]]:
    """``routes`` in the order of their rank, and for the positions that a virtual host serves, its domains.

    Envoy searches only the virtual host with the most specific domain, so each one also serves the routes of every
    wildcard that covers its domains. Sharing bounds the size, which would else grow with hosts times routes.
    """
    by_rank = sorted(routes, key=_rank)
    by_host: dict[str, list[int]] = {}
    for position, route in enumerate(by_rank):
        for host in _hosts(route):
            by_host.setdefault(host, []).append(position)
    sharing: dict[tuple[int, ...], list[str]] = {}
    for domain in sorted(by_host):
        served = dict.fromkeys(position for host in _covering(domain) for position in by_host.get(host, ()))
        sharing.setdefault(tuple(served), []).append(domain)
    return by_rank, sharing


def _json_bytes(message: Message) -> int:
    return len(json.dumps(message, separators=(",", ":")))


def _covering(domain: str) -> Iterator[str]:
    """``domain`` (a host or a wildcard), then every wildcard that covers it, the most specific first."""
    yield domain
    for position, character in enumerate(domain):
        if character == "." and domain[:position] != "*":
            yield "*" + domain[position:]
    yield "*"


def _rank(route: Route) -> tuple[bool, int, bool, int, int]:
    """Sort key for the routes of one host, see the module's table.

    The sort is stable, so routes of equal rank keep the order of declaration.
    """
    match = _match(route)
    exact, prefix = _path(match)
    return exact is None, -len(prefix), match.method is None, -len(match.headers), -len(match.query_params)


def _match(route: Route) -> RouteMatch:
    return route.match or RouteMatch()


def _hosts(route: Route) -> tuple[str, ...]:
    return tuple(host.lower() for host in route.hosts) or ("*",)


def _path(match: RouteMatch) -> tuple[str | None, str]:
    """The exact path or ``None``, then the prefix without its trailing slash, empty if the route has none."""
    return match.path_exact, (match.path_prefix or "").rstrip("/")


def _entries(route: Route, rank: int) -> Iterator[Message]:
    """Envoy's routes for one of the spec, which is at place ``rank`` of those of its listener."""
    match = _match(route)
    others = [_matched(":method", match.method)] if match.method else []
    others += [_matched(each.name, each.value) for each in match.headers]
    queries = [_matched(each.name, each.value) for each in match.query_params]
    changes = _changes(route)
    if route.rate_limit:
        changes["metadata"] = {"filter_metadata": {_RATE_LIMIT: {_RATE: str(rank)}}}
    replacement = route.prefix_rewrite or (route.redirect.prefix if route.redirect else None)
    for path, rewrite in _paths(match, replacement):
        if route.cors and match.method:
            preflight = [_matched(":method", "OPTIONS"), _matched("access-control-request-method", match.method)]
            yield _entry(path, preflight, queries, changes, _answer(route, rewrite, _retry_policy(route.retries)))
        if route.retries is None or match.method:
            policy = _retry_policy(route.retries, is_repeatable=match.method in _REPEATABLE)
            yield _entry(path, others, queries, changes, _answer(route, rewrite, policy))
        else:
            once = [_matched(":method", each.value) | {"invert_match": True} for each in _REPEATABLE]
            unsent = _retry_policy(route.retries, is_repeatable=False)
            yield _entry(path, [*once, *others], queries, changes, _answer(route, rewrite, unsent))
            yield _entry(path, others, queries, changes, _answer(route, rewrite, _retry_policy(route.retries)))


def _entry(path: Message, headers: list[Message], queries: list[Message], changes: Message, answer: Message) -> Message:
    conditions = {"headers": headers, "query_parameters": queries}
    return {"match": path | {name: each for name, each in conditions.items() if each}} | changes | answer


def _matched(name: str, value: str | None) -> Message:
    """A matcher of a header or of a query parameter; without a value it only has to be there."""
    return {"name": name, "present_match": True} if value is None else {"name": name, "string_match": {"exact": value}}


def _paths(match: RouteMatch, replacement: str | None) -> Iterator[tuple[Message, str | None]]:
    """The matches of a path, each with what replaces the matched part; ``None``: nothing does."""
    exact, prefix = _path(match)
    target = None if replacement is None else replacement.rstrip("/")
    if exact is not None:
        yield {"path": exact}, None
    elif not prefix:
        yield {"prefix": "/"}, None if target is None else f"{target}/"
    elif target == "":
        # Envoy puts the rest of the path behind what it replaces: /api/v1 would become //v1.
        yield {"path": prefix}, "/"
        yield {"prefix": f"{prefix}/"}, "/"
    else:
        yield {"path_separated_prefix": prefix}, target


def _answer(route: Route, rewrite: str | None, retry_policy: Message | None) -> Message:
    """What becomes of a matched request."""
    if route.redirect is not None:
        return {"redirect": _redirect(route.redirect, rewrite)}
    if route.response is not None:
        return _response(route.response)
    action: Message = {
        # Envoy's default of 15 s for a whole response would cut downloads, event streams and WebSockets.
        "timeout": f"{duration_s(route.timeout):g}s" if route.timeout else "0s",
        "idle_timeout": f"{duration_s(route.idle_timeout):g}s" if route.idle_timeout else None,
        "prefix_rewrite": rewrite,
        "host_rewrite_literal": route.host_rewrite,
        "retry_policy": retry_policy,
    }
    if route.backends:
        weights = [{"name": cluster_name(each.name), "weight": each.weight} for each in route.backends]
        action["weighted_clusters"] = {"clusters": weights}
    elif route.backend:
        action["cluster"] = cluster_name(route.backend)
    if route.mirror:
        share = {"default_value": {"numerator": route.mirror.percent, "denominator": "HUNDRED"}}
        mirror = {"cluster": cluster_name(route.mirror.backend), "runtime_fraction": share}
        # Else the copy would have another host, which many backends answer with 404.
        action["request_mirror_policies"] = [mirror | {"disable_shadow_host_suffix_append": True}]
    return {"route": {name: value for name, value in action.items() if value is not None}}


def _retry_policy(retries: Retries | None, *, is_repeatable: bool = True) -> Message | None:
    """The policy of a route; ``None`` where that of the virtual host applies."""
    if retries is None:
        return None
    conditions = retries.after or (RetryOn.CONNECTION, RetryOn.GATEWAY_ERROR)
    declared = ",".join(_RETRY_ON[each] for each in RetryOn if each in conditions)
    policy: Message = {"retry_on": declared if is_repeatable else _UNSENT, "num_retries": retries.attempts}
    if retries.per_try_timeout:
        policy["per_try_timeout"] = f"{duration_s(retries.per_try_timeout):g}s"
    return policy


def _redirect(redirect: Redirect, rewrite: str | None) -> Message:
    action: Message = {
        "scheme_redirect": redirect.scheme.value if redirect.scheme else None,
        "host_redirect": redirect.host,
        "port_redirect": redirect.port,
        "path_redirect": redirect.path,
        "prefix_rewrite": rewrite,
        "response_code": _REDIRECT_CODES[redirect.status],
    }
    return {name: value for name, value in action.items() if value is not None}


def _response(response: FixedResponse) -> Message:
    answer: Message = {"status": response.status}
    return {"direct_response": answer | ({"body": {"inline_string": response.body}} if response.body else {})}


def _changes(route: Route) -> Message:
    """Changes of headers and the configuration of filters, as members of a route."""
    changes: Message = {}
    for name, declared in (("request", route.request_headers), ("response", route.response_headers)):
        added, removed = _header_changes(declared)
        if name == "response" and route.response is not None and route.response.body:
            added = [_added("content-type", route.response.content_type, "OVERWRITE_IF_EXISTS_OR_ADD"), *added]
        changes[f"{name}_headers_to_add"] = added
        changes[f"{name}_headers_to_remove"] = removed
    configs = {
        _CORS: _cors(route.cors) if route.cors else None,
        _ACCESS: _access(route.access) if route.access else None,
    }
    changes["typed_per_filter_config"] = {name: value for name, value in configs.items() if value is not None}
    return {name: value for name, value in changes.items() if value}


def _header_changes(declared: HeaderChanges | None) -> tuple[list[Message], list[str]]:
    if declared is None:
        return [], []
    added = [_added(each.name, each.value, "OVERWRITE_IF_EXISTS_OR_ADD") for each in declared.set]
    added += [_added(each.name, each.value, "APPEND_IF_EXISTS_OR_ADD") for each in declared.add]
    return added, list(declared.remove)


def _added(name: str, value: str, action: str) -> Message:
    # A value is a format string of Envoy, in which %% stands for a percent sign.
    return {"header": {"key": name, "value": value.replace("%", "%%")}, "append_action": action}


def _cors(cors: Cors) -> Message:
    fields: Message = {
        # Envoy compares with the origin and with *, so an exact * takes every origin.
        "allow_origin_string_match": [{"exact": each} for each in cors.origins],
        "allow_methods": ", ".join(cors.methods or (Method.GET, Method.HEAD, Method.POST)),
        "allow_headers": ", ".join(cors.headers),
        "expose_headers": ", ".join(cors.expose_headers),
        "max_age": f"{duration_s(cors.max_age):.0f}" if cors.max_age else "",
        "allow_credentials": cors.credentials or None,
        # A preflight that is not granted gets no CORS header, and does not reach the backend.
        "forward_not_matching_preflights": False,
    }
    kept = {name: value for name, value in fields.items() if value not in ("", None)}
    return typed("filters.http.cors.v3.CorsPolicy", **kept)


def _access(access: Access) -> Message:
    """Allows the requests of clients that are allowed and not denied."""
    allowed = _clients(access.allow) if access.allow else {"any": True}
    principal = allowed
    if access.deny:
        denied = {"not_id": _clients(access.deny)}
        principal = {"and_ids": {"ids": [allowed, denied]}}
    policy = {"permissions": [{"any": True}], "principals": [principal]}
    rules = {"action": "ALLOW", "policies": {"clients": policy}}
    return typed("filters.http.rbac.v3.RBACPerRoute", rbac={"rules": rules})


def _clients(cidrs: tuple[str, ...]) -> Message:
    """Clients of these ranges. A proxy in front may write an IPv4 address as an IPv6 one, which Envoy tells apart."""
    ranges: list[Message] = []
    for network in map(ip_network, cidrs):
        ranges.append({"address_prefix": str(network.network_address), "prefix_len": network.prefixlen})
        if network.version == 4:
            mapped = {"address_prefix": f"::ffff:{network.network_address}", "prefix_len": 96 + network.prefixlen}
            ranges.append(mapped)
    return {"or_ids": {"ids": [{"remote_ip": each} for each in ranges]}}


def _rate_limits(rates: dict[str, RateLimit]) -> Message:
    """One bucket for each of ``rates``; a route's metadata name the one that its requests take from."""
    always = {"default_value": {"numerator": 100, "denominator": "HUNDRED"}}
    named = {"key": _RATE_LIMIT, "path": [{"key": _RATE}]}
    rate = {"descriptor_key": _RATE, "metadata_key": named, "source": "ROUTE_ENTRY", "skip_if_absent": True}
    return typed(
        "filters.http.local_ratelimit.v3.LocalRateLimit",
        stat_prefix="route",
        # What routes without a rate take from. Envoy wants one, and its interval has to divide those of the others.
        token_bucket=_bucket(_UNLIMITED, _UNLIMITED, 1),
        filter_enabled=always,
        filter_enforced=always,
        always_consume_default_token_bucket=False,
        rate_limits=[{"actions": [{"metadata": rate}]}],
        descriptors=[
            {
                "entries": [{"key": _RATE, "value": name}],
                "token_bucket": _bucket(limit.burst or limit.requests, limit.requests, limit.per.seconds),
            }
            for name, limit in rates.items()
        ],
    )


def _bucket(most: int, refill: int, interval_s: int) -> Message:
    return {"max_tokens": most, "tokens_per_fill": refill, "fill_interval": f"{interval_s}s"}
