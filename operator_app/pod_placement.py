"""What a spec says of its Pods' place, accounts and labels, as members of a Pod's spec in canonical form. Pure."""

from operator_app.api.kinds import Object
from operator_app.api.models import EnvoyProxySpec
from operator_app.api.placement import Toleration, TolerationOperator, TopologySpread


def pod_placement(spec: EnvoyProxySpec, selector: dict[str, str]) -> Object:
    """The members of the Pod's spec; none that ``spec`` says nothing of. ``selector`` selects the proxy's Pods."""
    account = spec.service_account_name
    members: Object = {
        "nodeSelector": spec.node_selector,
        "tolerations": [_toleration(each) for each in spec.tolerations],
        "topologySpreadConstraints": [_spread(each, selector) for each in spec.topology_spread],
        "priorityClassName": spec.priority_class_name,
        "serviceAccountName": account,
        # The API server keeps the field's old name equal, and would restore the new one from it (kubernetes#108208).
        "serviceAccount": account,
        "imagePullSecrets": [{"name": each.name} for each in spec.image_pull_secrets],
    }
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
