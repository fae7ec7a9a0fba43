"""The records of the in-cluster registry, which only the operator writes: ProxyRegistration, HostnameClaim. Pure."""

from enum import StrEnum
from typing import Annotated, ClassVar

from pydantic import Field

from operator_app.api.fields import DnsLabel, DnsName, Int64, Port, PortName, Ttl
from operator_app.api.models import Protocol
from operator_app.api.rules import ApiModel, Rule

InstallationName = Annotated[str, Field(pattern=r"^[0-9a-f]{32}[.][0-9a-f]{32}$", max_length=65)]
"""Digests of a cluster and of an installation of the operator in it."""


IpAddress = Annotated[str, Field(min_length=1, max_length=45)]
"""An IPv4 or IPv6 address."""


class ProxyReference(ApiModel):
    """Whose record this is; the UID decides, the names are for people."""

    namespace: Annotated[str, Field(min_length=1, max_length=63)]
    """Namespace of the EnvoyProxy."""

    name: Annotated[str, Field(min_length=1, max_length=253)]
    """Name of the EnvoyProxy."""

    uid: Annotated[str, Field(min_length=1, max_length=128)]
    """metadata.uid of the EnvoyProxy."""


class RegisteredPort(ApiModel):
    """One reachable port of the proxy."""

    name: PortName
    """Name of the listener."""

    port: Port
    """Port at the record's address."""

    protocol: Protocol
    """What the listener speaks."""


class RetiringName(ApiModel):
    """A name that may still be published for the proxy, and has to be taken back."""

    registry: DnsLabel
    """Name of the registry that may hold it."""

    hostname: DnsName
    """The name there."""


class RecordState(StrEnum):
    """Why there is a record: for its proxy, or although its proxy is gone."""

    REGISTERED = "Registered"
    ABANDONED = "Abandoned"
    ORPHANED = "Orphaned"
    LEFT = "Left"


class ProxyRegistrationSpec(ApiModel):
    """One proxy's entry in the in-cluster registry, written by the operator alone."""

    proxy: Annotated[
        ProxyReference,
        Rule(cel="self.uid == oldSelf.uid", message="a record keeps its owner: delete it and create another one"),
    ]
    """Whose record this is. Its uid never changes."""

    generation: Annotated[
        Int64,
        Field(ge=0),
        Rule(cel="self >= oldSelf", message="an older generation must not replace a newer one: read the record again"),
    ]
    """metadata.generation of the EnvoyProxy that the record was made from. Never goes back."""

    hostname: DnsName | None = None
    """spec.registration.hostname of the EnvoyProxy, once it has the claim on it."""

    ttl: Ttl | None = None
    """spec.registration.ttl of the EnvoyProxy."""

    registry: DnsLabel = "in-cluster"
    """Name of the registry that publishes the hostname; in-cluster is this record itself."""

    retiring: Annotated[tuple[RetiringName, ...], Field(max_length=64)] = ()
    """Names that were published before and may still be. Noted here before anything replaces them, struck out once
    their removal is confirmed."""

    state: RecordState = RecordState.REGISTERED
    """Registered: the proxy exists. Abandoned: it is gone, and its names are still to be taken back. Orphaned: it is
    gone, and its deletionPolicy keeps the record. Left: it is gone, and an address of it is left outside, since the
    proof that the operator wrote it is gone, too."""

    installations: Annotated[tuple[InstallationName, ...], Field(max_length=16)] = ()
    """The installations of the operator that records outside may carry for this proxy: the present one, and earlier
    ones until their records are rewritten. Empty where nothing is outside."""

    address: Annotated[str, Field(min_length=1, max_length=253)]
    """Where clients reach the proxy: an IP address or a DNS name."""

    more_addresses: Annotated[tuple[IpAddress, ...], Field(max_length=15)] = ()
    """Further IP addresses at which clients reach the proxy, where it has several."""

    ports: Annotated[tuple[RegisteredPort, ...], Field(max_length=16)]
    """The proxy's listeners."""


class ProxyRegistrationStatus(ApiModel):
    """What an outside registry has confirmed; nothing where this record is the registration itself."""

    confirmed_generation: Annotated[Int64, Field(ge=0)] | None = None
    """The metadata.generation of this record that the registry has confirmed; 0 once it was found otherwise."""

    confirmed_hostname: DnsName | None = None
    """The hostname that the registry has confirmed last; it stands outside until its removal is confirmed."""


class ProxyRegistration(ApiModel):
    """The record that makes a proxy known outside its namespace.

    The operator writes and removes it; edits by others are undone. It is also the operator's memory of what it has
    published elsewhere: remove it by hand and published names are forgotten.
    """

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            cel="self.metadata.name == 'proxy-' + self.spec.proxy.uid",
            message="metadata.name must be proxy- followed by spec.proxy.uid: one proxy has one record",
        ),
    )

    spec: ProxyRegistrationSpec
    """What is registered."""

    status: ProxyRegistrationStatus | None = None
    """What an outside registry has confirmed."""


class HostnameClaimSpec(ApiModel):
    """Who has a hostname, or had it last."""

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            cel="self.proxy.uid == oldSelf.proxy.uid || has(oldSelf.releasedAt)",
            message="a hostname keeps its proxy until that has given it back: delete the claim and create another one",
        ),
    )

    hostname: DnsName
    """The name that is taken."""

    proxy: ProxyReference
    """Whose it is. Another proxy's only after it was given back."""

    installation: Annotated[str, Field(min_length=1, max_length=63)] | None = None
    """Namespace of the operator that took it; operators of one cluster leave each other's claims alone."""

    released_at: Annotated[str, Field(max_length=32)] | None = Field(None, json_schema_extra={"format": "date-time"})
    """When the hostname was given back. Until it has rested, only the same tenant may take it; then anybody."""


class HostnameClaim(ApiModel):
    """One hostname of the cluster, taken by one EnvoyProxy: the API server's uniqueness of names makes it the only one.

    The operator writes and removes it.
    """

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            cel="self.metadata.name == self.spec.hostname",
            message="metadata.name must be spec.hostname: one hostname has one claim",
        ),
    )

    spec: HostnameClaimSpec
    """Who has the hostname."""
