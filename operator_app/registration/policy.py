"""Which namespaces may have which hostnames: the HostnamePolicies of the cluster, asked before a hostname is claimed.

Without any policy, every namespace may have every hostname. With one or more, a hostname needs a policy whose selector
chooses the namespace and which allows the name. What a proxy has already is not asked about again, so a change of a
policy, or a slip in one, takes nothing away from anybody; an audit lists what no policy allows any more.

Who was first does not belong here, but to ``claims``.
"""

from collections.abc import Collection, Iterable, Mapping
from typing import Final

import structlog
from pydantic import ValidationError

from operator_app.api.kinds import HOSTNAME_POLICY, NAMESPACE, Key, Object
from operator_app.api.policies import HostnamePolicySpec, NamespaceSelector, SelectorOperator, SelectorRequirement
from operator_app.kube.client import Cluster
from operator_app.kube.store import Store
from operator_app.results import Problem

log = structlog.get_logger(__name__)

HOSTNAME_NOT_ALLOWED: Final = "HostnameNotAllowed"
"""The reason of a hostname that no policy of the cluster allows the proxy's namespace."""

NAME_LABEL: Final = "kubernetes.io/metadata.name"
"""The label that the API server gives each namespace: its name."""


class Policies:
    """The policies that the store has. ``apexes`` are the zones of the registries, whose own names are special."""

    def __init__(self, store: Store, cluster: Cluster, *, apexes: Collection[str]) -> None:
        self._store = store
        self._cluster = cluster
        self._apexes = frozenset(apexes)

    async def problem(self, hostname: str, namespace: str) -> Problem | None:
        """Why the proxies of ``namespace`` may not have ``hostname``; ``None`` where they may.

        The namespace's labels are read from the API server, and only where there is a policy. Raises its errors.
        """
        policies = [
            each for key in self._store.keys(HOSTNAME_POLICY) if (each := self._store.get(HOSTNAME_POLICY, key))
        ]
        if not policies:
            return None
        found = await self._cluster.get(NAMESPACE, Key("", namespace))
        labels = (found or {}).get("metadata", {}).get("labels") or {}
        message = refusal(policies, namespace, labels, hostname, self._apexes)
        return None if message is None else Problem(HOSTNAME_NOT_ALLOWED, message, needs_user_action=True)


def refusal(
    policies: Iterable[Object],
    namespace: str,
    labels: Mapping[str, str],
    hostname: str,
    apexes: Collection[str] = (),
) -> str | None:
    """Why no policy allows ``namespace`` the hostname, in one sentence; ``None`` where one does, or there are none.

    A policy that can't be read allows nothing. Pure.
    """
    read = [_spec_of(each) for each in policies]
    chosen = [each for each in read if each is not None and is_selected(each.namespace_selector, namespace, labels)]
    named = [each for each in chosen if is_named(each, hostname)]
    if not read or any(each.allow_apex or hostname not in apexes for each in named):
        return None
    if named:
        return (
            f"{hostname} is a zone of its own, and no HostnamePolicy lets the namespace {namespace} have such a name "
            "(spec.allowApex): choose a name below it, or ask whoever runs the cluster"
        )
    if not chosen:
        return (
            f"no HostnamePolicy is for the namespace {namespace}, so it may have no hostname: ask whoever runs the "
            "cluster"
        )
    return (
        f"no HostnamePolicy lets the namespace {namespace} have {hostname}: choose another hostname "
        f"({_offer(chosen)}), or ask whoever runs the cluster"
    )


def is_named(policy: HostnamePolicySpec, hostname: str) -> bool:
    """Whether the policy names the hostname: exactly, by a wildcard for its first label, or by a suffix. Pure."""
    return (
        hostname in policy.hostnames
        or f"*.{hostname.partition('.')[2]}" in policy.hostnames
        or any(hostname.endswith(f".{suffix}") for suffix in policy.suffixes)
    )


def is_selected(selector: NamespaceSelector, namespace: str, labels: Mapping[str, str]) -> bool:
    """Whether the selector chooses a namespace with these labels. Pure."""
    has = {NAME_LABEL: namespace, **labels}
    return all(has.get(key) == value for key, value in selector.match_labels.items()) and all(
        _holds(each, has) for each in selector.match_expressions
    )


def _holds(requirement: SelectorRequirement, labels: Mapping[str, str]) -> bool:
    match requirement.operator:
        case SelectorOperator.IN:
            return labels.get(requirement.key) in requirement.values
        case SelectorOperator.NOT_IN:
            return labels.get(requirement.key) not in requirement.values
        case SelectorOperator.EXISTS:
            return requirement.key in labels
        case SelectorOperator.DOES_NOT_EXIST:
            return requirement.key not in labels


def _spec_of(policy: Object) -> HostnamePolicySpec | None:
    try:
        return HostnamePolicySpec.model_validate(policy["spec"])
    except (KeyError, ValidationError) as error:
        log.warning("policy_unreadable", policy=policy["metadata"]["name"], error=" ".join(str(error).split())[:300])
        return None


def _offer(policies: Iterable[HostnamePolicySpec]) -> str:
    """What the policies allow, for the status of a tenant: a few names at most."""
    names = [
        name for each in policies for name in (*(f"any below {suffix}" for suffix in each.suffixes), *each.hostnames)
    ]
    unique = list(dict.fromkeys(names))
    return ", ".join(unique[:4]) + (f" and {len(unique) - 4} more" if len(unique) > 4 else "") or "there is none"
