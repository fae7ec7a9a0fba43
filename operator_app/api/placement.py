"""What an EnvoyProxy's spec says of its Pods beyond the container: labels, nodes, accounts. Pure."""

import re
from enum import StrEnum
from typing import Annotated, ClassVar, Final

from pydantic import Field

from operator_app.api.fields import QUALIFIED_NAME, Int32, LabelValue, QualifiedName, Subdomain
from operator_app.api.kinds import GROUP
from operator_app.api.rules import ApiModel, Rule

_LAST_APPLIED: Final = "kubectl.kubernetes.io/last-applied-configuration"

MAX_ANNOTATIONS_TEXT: Final = 16_384
"""Characters of all annotations of one object together, keys included."""

_OWN_LABELS: Final = (
    "app.kubernetes.io/name",
    "app.kubernetes.io/instance",
    "app.kubernetes.io/component",
    "app.kubernetes.io/managed-by",
    "pod-template-hash",
)
"""Labels by which the operator and the Deployment's controller recognise Pods."""


def keys_are_qualified() -> Rule:
    """A rule of a map that each of its keys is a qualified name."""
    return Rule(
        cel=f"self.all(k, k.matches(r'^({QUALIFIED_NAME})$'))",
        message="every key must be a qualified name, for example example.com/owner: letters, digits, '-', '_' "
        "and '.', with an optional lower-case DNS name and '/' before it",
        is_valid=lambda value: all(re.fullmatch(QUALIFIED_NAME, key) for key in value),
    )


def annotations_are_free() -> Rule:
    """A rule of annotations that no key is one of the operator or of kubectl."""
    return Rule(
        cel=f"self.all(k, !k.startsWith('{GROUP}/') && k != '{_LAST_APPLIED}')",
        message=f"keys under {GROUP}/ belong to the operator and {_LAST_APPLIED} to kubectl: use a key of your own",
        is_valid=lambda value: not any(key.startswith(f"{GROUP}/") or key == _LAST_APPLIED for key in value),
    )


def text_is_bounded(characters: int) -> Rule:
    """A rule of annotations that keys and values together have at most so many ``characters``."""
    return Rule(
        cel=f"self.map(k, k.size() + self[k].size()).sum() <= {characters}",
        message=f"all annotations together must be at most {characters} characters, keys included: shorten them, or "
        "put large values into an object of their own",
        is_valid=lambda value: sum(len(key) + len(text) for key, text in value.items()) <= characters,
    )


Weight = Annotated[Int32, Field(ge=1, le=100)]
"""How much something is preferred."""

NodeSelector = Annotated[dict[str, LabelValue], Field(max_length=16), keys_are_qualified()]

PodLabels = Annotated[
    dict[str, LabelValue],
    Field(max_length=16),
    keys_are_qualified(),
    Rule(
        cel=f"self.all(k, !k.startsWith('{GROUP}/') && !(k in {list(_OWN_LABELS)}))",
        message=f"keys under {GROUP}/, pod-template-hash and app.kubernetes.io/name, instance, component and managed-"
        "by tell whose Pod it is: label it with a key of your own",
        is_valid=lambda value: not any(key.startswith(f"{GROUP}/") or key in _OWN_LABELS for key in value),
    ),
]

Annotations = Annotated[
    dict[str, Annotated[str, Field(max_length=4096)]],
    Field(max_length=32),
    keys_are_qualified(),
    annotations_are_free(),
    text_is_bounded(MAX_ANNOTATIONS_TEXT),
]

PriorityClassName = Annotated[
    Subdomain,
    Rule(
        cel="!self.startsWith('system-')",
        message="must not be one of the cluster's own classes, which begin with system-: name a class that the "
        "platform offers to tenants",
        is_valid=lambda value: not value.startswith("system-"),
    ),
]


class TaintEffect(StrEnum):
    """What a taint does to Pods that don't tolerate it, as in the core API."""

    NO_SCHEDULE = "NoSchedule"
    PREFER_NO_SCHEDULE = "PreferNoSchedule"
    NO_EXECUTE = "NoExecute"


class TolerationOperator(StrEnum):
    """How a toleration compares, as in the core API."""

    EXISTS = "Exists"
    EQUAL = "Equal"


class Toleration(ApiModel):
    """A taint of nodes that does not keep the proxy away."""

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            cel="!has(self.operator) || has(self.value) == (self.operator == 'Equal')",
            message="Equal compares with a value and Exists has none: write a value with Equal, and none with Exists",
            is_valid=lambda toleration: (
                toleration.operator is None
                or (toleration.value is not None) == (toleration.operator is TolerationOperator.EQUAL)
            ),
        ),
        Rule(
            cel="!has(self.tolerationSeconds) || (has(self.effect) && self.effect == 'NoExecute')",
            message="tolerationSeconds says how long a Pod stays on a node with a NoExecute taint: set effect to "
            "NoExecute, or remove it",
            is_valid=lambda toleration: (
                toleration.toleration_seconds is None or toleration.effect is TaintEffect.NO_EXECUTE
            ),
        ),
    )

    key: QualifiedName
    """Key of the taint, for example example.com/edge."""

    operator: TolerationOperator | None = None
    """Equal, the taint has this value; Exists, it has any. Left out: Equal with a value, Exists without one."""

    value: LabelValue | None = None
    """Value of the taint. Left out: any value."""

    effect: TaintEffect | None = None
    """Effect of the taint: NoSchedule, PreferNoSchedule or NoExecute. Left out: all of them."""

    toleration_seconds: Annotated[Int32, Field(ge=0, le=86_400)] | None = None
    """For how many seconds a Pod stays on a node that got such a NoExecute taint, 0 to 86400. Left out: for ever."""


class WhenUnsatisfiable(StrEnum):
    """What happens to a Pod that can't be spread, as in the core API."""

    SCHEDULE_ANYWAY = "ScheduleAnyway"
    DO_NOT_SCHEDULE = "DoNotSchedule"


class TopologySpread(ApiModel):
    """Spreads the proxies of one configuration evenly over nodes, zones or whatever a node label tells apart."""

    topology_key: QualifiedName
    """Label of nodes whose values tell the parts, for example topology.kubernetes.io/zone or kubernetes.io/hostname."""

    max_skew: Annotated[Int32, Field(ge=1, le=100)] = 1
    """By how many proxies two parts may differ, 1 to 100. Left out: 1."""

    when_unsatisfiable: WhenUnsatisfiable = WhenUnsatisfiable.SCHEDULE_ANYWAY
    """ScheduleAnyway: a proxy that can't be spread runs all the same; DoNotSchedule: it waits. Left out:
    ScheduleAnyway."""


class NodeOperator(StrEnum):
    """How a label of a node is compared, as in the core API."""

    IN = "In"
    NOT_IN = "NotIn"
    EXISTS = "Exists"
    DOES_NOT_EXIST = "DoesNotExist"

    @property
    def compares(self) -> bool:
        """Whether it compares with values."""
        return self in (NodeOperator.IN, NodeOperator.NOT_IN)


class NodeAffinity(ApiModel):
    """Nodes that proxies run on, or had better run on."""

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            cel="(self.operator in ['In', 'NotIn']) == has(self.values)",
            message="In and NotIn compare with values, and Exists and DoesNotExist have none: write values with the "
            "former, and none with the latter",
            is_valid=lambda affinity: affinity.operator.compares == bool(affinity.values),
        ),
    )

    key: QualifiedName
    """Label of nodes, for example topology.kubernetes.io/zone."""

    operator: NodeOperator
    """In, the label has one of the values; NotIn, it has none of them or is missing; Exists, it is there with any
    value; DoesNotExist, it is not there."""

    values: Annotated[tuple[LabelValue, ...], Field(min_length=1, max_length=16)] = ()
    """Values of the label, 1 to 16, for example eu-1a and eu-1b."""

    weight: Weight | None = None
    """How much such a node is preferred to others, 1 to 100, compared with the other weights. Left out: no other node
    will do, and a proxy without such a node waits."""


class PodAffinity(ApiModel):
    """Pods of the namespace that proxies run close to, or apart from."""

    pod_labels: Annotated[dict[str, LabelValue], Field(min_length=1, max_length=16), keys_are_qualified()]
    """Labels of the Pods, all of them, for example app: shop."""

    apart: Annotated[bool, Field(strict=True)] = False
    """Whether proxies keep away from these Pods; else they keep close to them. Left out: false."""

    topology_key: QualifiedName = "kubernetes.io/hostname"
    """Label of nodes that says what is close: nodes with the same value are. Left out: kubernetes.io/hostname."""

    weight: Weight | None = None
    """How much it is preferred, 1 to 100, compared with the other weights. Left out: a proxy that can't have it
    waits."""


class Affinity(ApiModel):
    """Which nodes and which neighbours proxies want. Proxies are kept apart from each other by topologySpread."""

    nodes: Annotated[tuple[NodeAffinity, ...], Field(max_length=8)] = ()
    """Nodes, by their labels, at most 8 entries. All entries without a weight must hold."""

    pods: Annotated[tuple[PodAffinity, ...], Field(max_length=8)] = ()
    """Pods of the proxy's namespace, by their labels, at most 8 entries. All entries without a weight must hold."""


class SecretReference(ApiModel):
    """A Secret of the namespace."""

    name: Subdomain
    """Name of the Secret, for example registry-key."""
