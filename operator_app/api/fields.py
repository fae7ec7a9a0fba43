"""Types of single fields, each with the bounds and rules of one value. Pure."""

import re
from ipaddress import ip_address, ip_network
from typing import Annotated, Final

from pydantic import BeforeValidator, Field

from operator_app.api.rules import Rule, lacks, matches

LABEL_EXPRESSION: Final = "[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?"
"""One label of a DNS name (RFC 1123 section 2.1), in lower case."""

DNS_NAME_EXPRESSION: Final = f"({LABEL_EXPRESSION}[.])*[a-z]([-a-z0-9]{{0,61}}[a-z0-9])?"
"""A DNS name whose last label begins with a letter, so that no mistyped IPv4 address matches (RFC 1123 section 2.1)."""


def _is_dns_name(value: str) -> bool:
    return re.fullmatch(DNS_NAME_EXPRESSION, value) is not None


def _is_ip(value: str) -> bool:
    """Whether CEL's ``isIP`` accepts ``value``: an address without zone that is not an IPv4-mapped IPv6 address."""
    try:
        address = ip_address(value)
    except ValueError:
        return False
    return "%" not in value and not (address.version == 6 and address.ipv4_mapped is not None)


def _is_network(value: str) -> bool:
    """Whether CEL's ``isCIDR`` accepts ``value``, and no bit of it is set behind its prefix."""
    try:
        network = ip_network(value)
    except ValueError:
        return False
    prefix = value.partition("/")[2]
    is_mapped = network.version == 6 and network.network_address.ipv4_mapped is not None
    return prefix == str(network.prefixlen) and "%" not in value and not is_mapped


DnsLabel = Annotated[
    str,
    Field(min_length=1, max_length=63),
    matches(
        "[a-z]([-a-z0-9]*[a-z0-9])?",
        "must be lower-case letters, digits and '-', begin with a letter and not end with '-', for example orders-v2",
    ),
]
"""A DNS label (RFC 1035 section 2.3.1), in lower case."""

PortName = Annotated[
    str,
    Field(min_length=1, max_length=15),
    matches(
        "[a-z](-?[a-z0-9])*",
        "must be at most 15 lower-case letters, digits and single '-', and begin with a letter, for example http",
    ),
]
"""Valid as the name of a Service's port and of a container's (RFC 6335 section 5.1), and as a DNS label."""

Int32 = Annotated[int, Field(strict=True, json_schema_extra={"format": "int32"})]

Int64 = Annotated[int, Field(strict=True, json_schema_extra={"format": "int64"})]

Port = Annotated[Int32, Field(ge=1, le=65535)]

TargetPort = Annotated[Int32, Field(ge=1024, le=65535)]

DnsName = Annotated[
    str,
    Field(min_length=1, max_length=253),
    matches(
        DNS_NAME_EXPRESSION,
        "must be a DNS name in lower case, without port, scheme or trailing dot, for example shop.example.com",
    ),
]

# One exact expression, for as many hosts as a proxy may have, would exceed the API server's cost limit for CEL rules.
# Several short ones stay below it, and each has a message of its own.
RequestHost = Annotated[
    str,
    Field(min_length=1, max_length=253),
    lacks(
        "[^*a-z0-9.-]",
        "must be a DNS name in lower case, without scheme, port or path, for example shop.example.com",
    ),
    lacks(
        ".[*]|[*]([^.]|$)",
        "may have one '*', as the whole first label, for example *.example.com; leave hosts out to match every host",
    ),
    lacks(
        r"(^|\.)[.-]|[.-]$|-\.",
        "must not have a label that is empty or begins or ends with '-': write it like shop.example.com, without a dot "
        "at the end",
    ),
    lacks("[^.]{64}", "must not have a label of more than 63 characters: no such DNS name exists"),
    lacks(
        "(^|[.])[0-9][^.]*$",
        "must not be an IP address or end in a number: write a DNS name, or leave hosts out to match every host",
    ),
]
"""Accepts what ``matches(rf"([*][.])?{DNS_NAME_EXPRESSION}", ...)`` would accept."""

Host = Annotated[
    str,
    Field(min_length=1, max_length=253),
    Rule(
        cel=f"isIP(self) || self.matches(r'^({DNS_NAME_EXPRESSION})$')",
        message="must be a DNS name in lower case, for example app.team-a.svc, or an IP address without brackets, for "
        "example 10.0.0.7 or fd00::7; the port has a field of its own",
        is_valid=lambda value: _is_ip(value) or _is_dns_name(value),
    ),
    # Envoy is the only container of its Pod, so a loopback address could reach only Envoy's own admin interface.
    Rule(
        cel="isIP(self) ? ip(self).isGlobalUnicast() : self != 'localhost' && !self.endsWith('.localhost')",
        message="must be reachable from other Pods: write the backend's Service name or its own address, not a "
        "loopback, unspecified, link-local, multicast or broadcast address",
    ),
]

_PATH_CHARACTERS: Final = "[-A-Za-z0-9._~!&()+,;=:@/]"

UrlPath = Annotated[
    str,
    Field(min_length=1, max_length=1024),
    matches(
        f"/{_PATH_CHARACTERS}*",
        "must begin with '/' and hold only letters, digits and -._~!&()+,;=:@/ after it, for example /api/v1; "
        "wildcards, percent-encoding, query and fragment can't be matched: end the path before them",
    ),
    Rule(
        cel=r"!self.contains('//') && !self.matches(r'/[.][.]?(/|$)')",
        message="must not contain //, /./ or /../: Envoy resolves them before it compares, so such a path never "
        "matches; write the resolved path",
        is_valid=lambda value: "//" not in value and re.search(r"/\.\.?(/|\Z)", value) is None,
    ),
]
"""Path characters of RFC 3986 section 3.3, without percent-encoding, quote, star and dollar."""

NewPath = Annotated[UrlPath, Field(max_length=256)]
"""A path that replaces another one, or a part of it."""

_IMAGE_PART: Final = "[a-z0-9]+(([._]|__|-+)[a-z0-9]+)*"

Image = Annotated[
    str,
    Field(min_length=1, max_length=512),
    matches(
        f"([A-Za-z0-9][-A-Za-z0-9.]*(:[0-9]{{1,5}})?/)?{_IMAGE_PART}(/{_IMAGE_PART})*"
        "(:[A-Za-z0-9_][-A-Za-z0-9._]{0,127})?(@sha256:[0-9a-f]{64})?",
        "must be an image reference without spaces, for example envoyproxy/envoy:v1.40.0",
    ),
]

Duration = Annotated[
    str,
    Field(min_length=1, max_length=7),
    Rule(
        cel="self.matches(r'^[1-9][0-9]{0,4}(ms|s)$') && duration(self) <= duration('60s')",
        message="must be between 1ms and 60s, as a whole number with its unit, for example 250ms or 5s",
        is_valid=lambda value: re.fullmatch("[1-9][0-9]{0,4}(ms|s)", value) is not None and duration_s(value) <= 60,
    ),
]


LongDuration = Annotated[
    str,
    Field(min_length=1, max_length=7),
    Rule(
        cel="self.matches(r'^[1-9][0-9]{0,4}(ms|s|m)$') && duration(self) <= duration('60m')",
        message="must be between 1ms and 60m, as a whole number with its unit, for example 250ms, 15s or 5m",
        is_valid=lambda value: re.fullmatch("[1-9][0-9]{0,4}(ms|s|m)", value) is not None and duration_s(value) <= 3600,
    ),
]


def duration_s(duration: str) -> float:
    """A ``Duration`` or ``LongDuration`` in seconds: ``"250ms"`` is 0.25, ``"2m"`` is 120."""
    number = duration.rstrip("ms")
    return int(number) * {"ms": 0.001, "s": 1.0, "m": 60.0}[duration[len(number) :]]


def _quantity_text(value: object) -> object:
    """An integer as text, since a Pod accepts ``cpu: 2`` as the quantity ``"2"``; any other value as it is."""
    return str(value) if isinstance(value, int) and not isinstance(value, bool) else value


# Two digits of exponent are enough for any amount; "1e999999999" would make decimal arithmetic arbitrarily slow.
_QUANTITY: Final = "[+]?([0-9]+([.][0-9]*)?|[.][0-9]+)([KMGTPE]i|[numkMGTPE]|[eE][-+]?[0-9]{1,2})?"

Quantity = Annotated[
    str,
    BeforeValidator(_quantity_text),
    Field(min_length=1, max_length=32, json_schema_extra={"x-kubernetes-int-or-string": True}),
    Rule(
        cel=f"string(self).matches(r'^({_QUANTITY})$')",
        message="must be a quantity that is not negative, for example 250m or 2 for cpu, 256Mi for memory",
        is_valid=lambda value: re.fullmatch(_QUANTITY, value) is not None,
    ),
]
"""``resource.Quantity`` of the core API, without negative values."""

Ttl = Annotated[Int32, Field(ge=1, le=86_400)]
"""Time to live of a DNS record in seconds.

DNS allows 0 to 2^31-1 (RFC 2181 section 8). One day bounds how long a resolver may return an old record after a change;
0 would disable caching, so that every look-up reaches the name server.
"""

QUALIFIED_NAME: Final = f"(({LABEL_EXPRESSION}[.])*{LABEL_EXPRESSION}/)?[A-Za-z0-9]([-A-Za-z0-9_.]{{0,61}}[A-Za-z0-9])?"
"""The key of a label or an annotation, and what else Kubernetes names in this form."""

QualifiedName = Annotated[
    str,
    Field(min_length=1, max_length=317),
    matches(
        QUALIFIED_NAME,
        "must be letters, digits, '-', '_' and '.', with an optional lower-case DNS name and '/' before it, for "
        "example topology.kubernetes.io/zone",
    ),
]

LabelValue = Annotated[
    str,
    Field(max_length=63),
    matches(
        "([A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?)?",
        "must be at most 63 letters, digits, '-', '_' and '.', and begin and end with a letter or digit, for example "
        "v1.2",
    ),
]

Subdomain = Annotated[
    str,
    Field(min_length=1, max_length=253),
    matches(
        f"({LABEL_EXPRESSION}[.])*{LABEL_EXPRESSION}",
        "must be the name of an object of the namespace: lower-case letters, digits, '-' and '.', for example "
        "registry-key",
    ),
]
"""A DNS subdomain (RFC 1123), which most objects' names are."""

NamespaceName = Annotated[
    str,
    Field(min_length=1, max_length=63),
    matches(
        LABEL_EXPRESSION, "must be the name of a namespace: lower-case letters, digits and '-', for example team-b"
    ),
]

Cidr = Annotated[
    str,
    Field(min_length=1, max_length=43),
    Rule(
        cel="isCIDR(self) && cidr(self) == cidr(self).masked()",
        message="must be a range of addresses with no bit set behind its prefix, for example 10.0.0.0/8 or fd00::/8; "
        "one address is 10.0.0.7/32",
        is_valid=_is_network,
    ),
]
"""A range of IP addresses in CIDR notation."""

HeaderName = Annotated[
    str,
    Field(min_length=1, max_length=64),
    lacks(
        "[^-a-z0-9]",
        "must be lower-case letters, digits and '-', for example x-canary; HTTP does not tell upper from lower case",
    ),
]
"""The name of an HTTP header (RFC 9110 section 5.1), without the characters that no common header has."""

HeaderValue = Annotated[
    str,
    Field(min_length=1, max_length=256),
    lacks("[^ -~]", "must be printable ASCII characters: leave out line breaks and tabs, and encode other letters"),
]
"""The value of an HTTP header (RFC 9110 section 5.5)."""

QueryText = Annotated[
    str,
    Field(min_length=1, max_length=128),
    lacks(
        "[^-A-Za-z0-9._~]",
        "must be letters, digits, '-', '.', '_' and '~', which need no percent-encoding, for example version",
    ),
]
"""Name or value of a query parameter."""
