"""HostnamePolicy: which namespaces may have which hostnames, written by whoever runs the platform. Pure."""

from enum import StrEnum
from typing import Annotated, ClassVar

from pydantic import Field

from operator_app.api.fields import DNS_NAME_EXPRESSION, DnsName
from operator_app.api.rules import ApiModel, Rule, matches

LabelKey = Annotated[str, Field(min_length=1, max_length=317)]
LabelValue = Annotated[str, Field(max_length=63)]

HostnamePattern = Annotated[
    str,
    Field(min_length=1, max_length=253),
    matches(
        rf"([*][.])?{DNS_NAME_EXPRESSION}",
        "must be a DNS name in lower case, or *. and a DNS name, for example shop.example.com or *.example.com",
    ),
]
"""A hostname, or ``*.`` and a name for all hostnames of one label more."""


class SelectorOperator(StrEnum):
    """How a label is compared with values."""

    IN = "In"
    NOT_IN = "NotIn"
    EXISTS = "Exists"
    DOES_NOT_EXIST = "DoesNotExist"


class SelectorRequirement(ApiModel):
    """One comparison of a label."""

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            cel="(self.operator in ['In', 'NotIn']) == (has(self.values) && size(self.values) > 0)",
            message="In and NotIn need values, Exists and DoesNotExist have none",
            is_valid=lambda self: (
                (self.operator in (SelectorOperator.IN, SelectorOperator.NOT_IN)) == bool(self.values)
            ),
        ),
    )

    key: LabelKey
    """The label's key."""

    operator: SelectorOperator
    """How the label is compared."""

    values: Annotated[tuple[LabelValue, ...], Field(max_length=64)] = ()
    """What the label is compared with, by In and NotIn."""


class NamespaceSelector(ApiModel):
    """Chooses namespaces by their labels; all requirements have to hold, and without any all namespaces are chosen."""

    match_labels: Annotated[dict[str, LabelValue], Field(max_length=64)] = Field(default_factory=dict)
    """Labels that a namespace has to have; kubernetes.io/metadata.name is its name."""

    match_expressions: Annotated[tuple[SelectorRequirement, ...], Field(max_length=64)] = ()
    """Further requirements of a namespace's labels."""


class HostnamePolicySpec(ApiModel):
    """Which hostnames the EnvoyProxies of some namespaces may take."""

    namespace_selector: NamespaceSelector
    """The namespaces that the policy is for; {} is all of them."""

    hostnames: Annotated[tuple[HostnamePattern, ...], Field(max_length=64)] = ()
    """Hostnames that they may take: exact names, and *.example.com for every name of one label more."""

    suffixes: Annotated[tuple[DnsName, ...], Field(max_length=64)] = ()
    """They may take every name below one of these, at any depth, and not these names themselves."""

    allow_apex: bool = False
    """Whether that includes names that are a whole zone's own, such as example.com for the zone example.com."""


class HostnamePolicy(ApiModel):
    """Which namespaces may have which hostnames.

    Without any policy every namespace may take every free hostname. As soon as there is one, a hostname needs a policy
    that allows it; several policies allow what any of them allows. What a proxy has already, it keeps.
    """

    spec: HostnamePolicySpec
    """Which hostnames the EnvoyProxies of some namespaces may take."""
