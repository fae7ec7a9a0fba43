"""Who may have which hostname, by all policies of a cluster."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from operator_app.api.kinds import Object
from operator_app.api.policies import HostnamePolicySpec, NamespaceSelector
from operator_app.registration.policy import is_named, is_selected, refusal

TEAM = {"matchLabels": {"team": "a"}}
LABELS = {"team": "a", "stage": "prod"}
EITHER: list[dict[str, Any]] = [{"hostnames": ["eu.example.com"]}, {"suffixes": ["example.com"]}]


def a_policy(selector: Object | None = None, **spec: Any) -> Object:
    """A policy for the namespaces of team a, unless another selector is given."""
    return {"metadata": {"name": "p"}, "spec": {"namespaceSelector": TEAM if selector is None else selector, **spec}}


@given(st.text(), st.text())
def test_without_a_policy_every_namespace_may_have_every_hostname(namespace: str, hostname: str) -> None:
    """As before there were policies."""
    assert refusal([], namespace, {}, hostname) is None


@pytest.mark.parametrize(
    ("hostname", "allowed"),
    [
        ("shop.example.com", True),
        ("cart.example.com", False),
        ("a.wild.example.org", True),
        ("b.a.wild.example.org", False),
        ("wild.example.org", False),
        ("x.team-a.example.net", True),
        ("x.y.team-a.example.net", True),
        ("team-a.example.net", False),
        ("xteam-a.example.net", False),
    ],
)
def test_exact_names_wildcards_and_suffixes(hostname: str, *, allowed: bool) -> None:
    """A wildcard is for one label, a suffix for any number of them, and neither for itself."""
    policy = a_policy(hostnames=["shop.example.com", "*.wild.example.org"], suffixes=["team-a.example.net"])
    assert (refusal([policy], "shops", LABELS, hostname) is None) == allowed
    assert is_named(HostnamePolicySpec.model_validate(policy["spec"]), hostname) == allowed


@pytest.mark.parametrize(
    ("selector", "chosen"),
    [
        ({}, True),
        (TEAM, True),
        ({"matchLabels": {"team": "b"}}, False),
        ({"matchLabels": {"kubernetes.io/metadata.name": "shops"}}, True),
        ({"matchExpressions": [{"key": "team", "operator": "In", "values": ["a", "b"]}]}, True),
        ({"matchExpressions": [{"key": "team", "operator": "NotIn", "values": ["a"]}]}, False),
        ({"matchExpressions": [{"key": "none", "operator": "NotIn", "values": ["a"]}]}, True),
        ({"matchExpressions": [{"key": "none", "operator": "In", "values": ["a"]}]}, False),
        ({"matchExpressions": [{"key": "stage", "operator": "Exists"}]}, True),
        ({"matchExpressions": [{"key": "stage", "operator": "DoesNotExist"}]}, False),
        ({"matchLabels": {"team": "a"}, "matchExpressions": [{"key": "none", "operator": "Exists"}]}, False),
    ],
)
def test_a_selector_means_what_it_means_in_kubernetes(selector: Object, *, chosen: bool) -> None:
    """All requirements have to hold; NotIn holds for a label that is not there."""
    assert is_selected(NamespaceSelector.model_validate(selector), "shops", LABELS) == chosen


def test_several_policies_allow_what_any_of_them_allows() -> None:
    """A policy for other namespaces allows nothing, but makes names need a policy."""
    others = a_policy({"matchLabels": {"team": "b"}}, suffixes=["example.com"])
    said = refusal([others], "shops", LABELS, "shop.example.com")
    assert said is not None
    assert "no HostnamePolicy is for the namespace shops" in said
    ours = a_policy(hostnames=["shop.example.com"])
    assert refusal([others, ours], "shops", LABELS, "shop.example.com") is None
    said = refusal([others, ours], "shops", LABELS, "cart.example.com")
    assert said is not None
    assert "(shop.example.com)" in said, "what it may have is told, and nothing of what others may have"


def test_an_apex_needs_a_policy_that_says_so() -> None:
    """A name that is a whole zone's own, be it listed or below a suffix."""
    zones = {"example.com", "eu.example.com"}
    for listed in EITHER:
        said = refusal([a_policy(**listed)], "shops", LABELS, "eu.example.com", zones)
        assert said is not None
        assert "allowApex" in said
        assert refusal([a_policy(**listed)], "shops", LABELS, "eu.example.com") is None
        assert refusal([a_policy(**listed, allowApex=True)], "shops", LABELS, "eu.example.com", zones) is None


def test_a_policy_that_cannot_be_read_allows_nothing() -> None:
    """It may have been stored under an older CRD; what it says is no permission."""
    assert refusal([a_policy(hostnames=7)], "shops", LABELS, "shop.example.com") is not None
