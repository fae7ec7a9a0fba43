"""What a spec says of its Pods' place, accounts and labels, as members of a Pod's spec in canonical form. Pure."""

from collections.abc import Iterable
from typing import Final

from operator_app.api.kinds import Object
from operator_app.api.models import EnvoyProxySpec
from operator_app.api.placement import (
    Affinity,
    NodeAffinity,
    PodAffinity,
    Toleration,
    TolerationOperator,
    TopologySpread,
)

_REQUIRED: Final = "requiredDuringSchedulingIgnoredDuringExecution"
_PREFERRED: Final = "preferredDuringSchedulingIgnoredDuringExecution"


def pod_placement(spec: EnvoyProxySpec, selector: dict[str, str]) -> Object:
    """The members of the Pod's spec; none that ``spec`` says nothing of. ``selector`` selects the proxy's Pods."""
    account = spec.service_account_name
    members: Object = {
        "nodeSelector": spec.node_selector,
        "affinity": _affinity(spec.affinity or Affinity()),
        "tolerations": [_toleration(each) for each in spec.tolerations],
        "topologySpreadConstraints": [_spread(each, selector) for each in spec.topology_spread],
        "priorityClassName": spec.priority_class_name,
        "serviceAccountName": account,
        # The API server keeps the field's old name equal, and would restore the new one from it (kubernetes#108208).
        "serviceAccount": account,
        "imagePullSecrets": [{"name": each.name} for each in spec.image_pull_secrets],
    }
    return {name: value for name, value in members.items() if value}


def _affinity(declared: Affinity) -> Object:
    """A Pod's affinity, without empty members, which the API server would store nevertheless."""
    members = {
        "nodeAffinity": _node_affinity(declared.nodes),
        "podAffinity": _pod_affinity(each for each in declared.pods if not each.apart),
        "podAntiAffinity": _pod_affinity(each for each in declared.pods if each.apart),
    }
    return {name: value for name, value in members.items() if value}


def _node_affinity(declared: Iterable[NodeAffinity]) -> Object:
    # The terms of a node selector are alternatives, the expressions of one term are not: one term has all of them.
    required, preferred = [], []
    for each in declared:
        expression: Object = {"key": each.key, "operator": each.operator.value}
        if each.values:
            expression["values"] = list(each.values)
        if each.weight is None:
            required.append(expression)
        else:
            preferred.append({"weight": each.weight, "preference": {"matchExpressions": [expression]}})
    members: Object = {
        _REQUIRED: {"nodeSelectorTerms": [{"matchExpressions": required}]} if required else None,
        _PREFERRED: preferred,
    }
    return {name: value for name, value in members.items() if value}


def _pod_affinity(declared: Iterable[PodAffinity]) -> Object:
    required, preferred = [], []
    for each in declared:
        # Without namespaces it is about those of the Pod's own namespace.
        term = {"labelSelector": {"matchLabels": each.pod_labels}, "topologyKey": each.topology_key}
        if each.weight is None:
            required.append(term)
        else:
            preferred.append({"weight": each.weight, "podAffinityTerm": term})
    members = {_REQUIRED: required, _PREFERRED: preferred}
    return {name: value for name, value in members.items() if value}


def _toleration(declared: Toleration) -> Object:
    operator = TolerationOperator.EXISTS if declared.value is None else TolerationOperator.EQUAL
    members: Object = {
        "key": declared.key,
        "operator": operator.value,
        "value": declared.value or None,
        "effect": declared.effect.value if declared.effect else None,
        "tolerationSeconds": declared.toleration_seconds,
    }
    return {name: value for name, value in members.items() if value is not None}


def _spread(declared: TopologySpread, selector: dict[str, str]) -> Object:
    return {
        "topologyKey": declared.topology_key,
        "maxSkew": declared.max_skew,
        "whenUnsatisfiable": declared.when_unsatisfiable.value,
        "labelSelector": {"matchLabels": selector},
        # Of one configuration: else Pods that a rollout is about to remove would count.
        "matchLabelKeys": ["pod-template-hash"],
    }
