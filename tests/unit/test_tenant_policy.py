"""What the platform does not allow is refused with a sentence, and so is every spec of the hostile corpus."""

from typing import Any

import pytest
from pydantic import ValidationError

from operator_app.api.kinds import Object
from operator_app.api.models import parse_spec, sentence
from operator_app.errors import TerminalError
from operator_app.settings import Settings
from operator_app.tenant_policy import OPTIONAL_FIELDS, TenantPolicy
from tests import hostile_specs
from tests.api_cases import Path, edited, proxy

STRICT = TenantPolicy(
    images=("envoyproxy/envoy", "registry.example.com/mirror/"),
    service_types=("ClusterIP", "LoadBalancer"),
    annotation_prefixes=("example.com/",),
    forbidden_networks=(*Settings().forbidden_networks, "10.96.0.0/12"),
    forbidden_fields=("affinity",),
)


def allowed() -> Object:
    """A proxy without the fields that ``STRICT`` forbids."""
    obj = proxy()
    del obj["spec"]["affinity"]
    return obj


OTHERS: dict[str, Any] = {"autoscaling": {"maxReplicas": 3}, "paused": True}
"""Values of fields that the proxy of ``api_cases`` does not have."""


def test_the_corpus_is_large() -> None:
    """At least sixty specs, with different names."""
    assert len(hostile_specs.REFUSED) + len(hostile_specs.NOT_ALLOWED) + len(hostile_specs.HARMLESS) >= 60


@pytest.mark.parametrize(("at", "value"), hostile_specs.REFUSED.values(), ids=hostile_specs.REFUSED)
def test_the_rules_refuse_it_with_a_sentence(at: Path, value: object) -> None:
    """The error begins with the field and says more than its name."""
    with pytest.raises(ValidationError) as refused:
        parse_spec(edited(proxy(), at, value))
    assert sentence(refused.value).startswith("spec")
    assert len(sentence(refused.value).split()) > 3


@pytest.mark.parametrize(("at", "value"), hostile_specs.NOT_ALLOWED.values(), ids=hostile_specs.NOT_ALLOWED)
def test_the_platform_refuses_it_with_a_sentence(at: Path, value: object) -> None:
    """The refusal names the field and what is allowed; without the policy's settings the spec is valid."""
    obj = edited(allowed(), at, value)
    if at == ("spec", "service"):
        obj["spec"]["listeners"][0].pop("nodePort", None)
    spec = parse_spec(obj)
    with pytest.raises(TerminalError) as refused:
        STRICT.check(spec)
    assert refused.value.reason == "NotAllowed"
    assert refused.value.message.startswith("spec.")
    assert ": use " in refused.value.message or ": name " in refused.value.message


@pytest.mark.parametrize(("at", "value"), hostile_specs.HARMLESS.values(), ids=hostile_specs.HARMLESS)
def test_what_is_harmless_is_accepted(at: Path, value: object) -> None:
    """Neither the rules nor the policy refuse it."""
    STRICT.check(parse_spec(edited(allowed(), at, value)))


@pytest.mark.parametrize(
    "image",
    [
        None,
        "envoyproxy/envoy",
        "envoyproxy/envoy:v1.40.0",
        "envoyproxy/envoy@sha256:" + "0" * 64,
        "registry.example.com/mirror/any/envoy:v1",
    ],
)
def test_allowed_images_are_allowed(image: str | None) -> None:
    """The operator's default, and what is below an allowed prefix."""
    obj = allowed()
    obj["spec"].pop("image")
    STRICT.check(parse_spec(edited(obj, ("spec", "image"), image) if image else obj))


@pytest.mark.parametrize("field", OPTIONAL_FIELDS)
def test_any_optional_field_can_be_forbidden(field: str) -> None:
    """A spec without it is allowed; one with it is refused, and the sentence names the field."""
    policy = TenantPolicy(forbidden_fields=(field,))
    obj = proxy()
    value = obj["spec"].pop(field, None)
    policy.check(parse_spec(obj))
    obj["spec"][field] = OTHERS.get(field, value)
    with pytest.raises(TerminalError, match=f"^spec.{field}: "):
        policy.check(parse_spec(obj))


def test_only_a_field_that_can_be_left_out_can_be_forbidden() -> None:
    """A misspelt name, or a field that every spec has, is an error when the operator starts."""
    assert Settings(tenant_forbidden_fields=("affinity", "tolerations")).tenant_policy.forbidden_fields
    for name in ("afinity", "listeners", "node_selector"):
        with pytest.raises(ValidationError, match="is no field of spec that can be left out"):
            Settings(tenant_forbidden_fields=(name,))


def test_the_default_policy_forbids_metadata_and_loopback_alone() -> None:
    """Images, Service types and annotations are free; addresses that reach the node or a cloud's metadata are not."""
    policy = Settings().tenant_policy
    policy.check(parse_spec(proxy()))
    for at, value in hostile_specs.NOT_ALLOWED.values():
        spec = parse_spec(edited(proxy(), at, value))
        if at[-1] == "host" and value != "10.96.0.1":
            with pytest.raises(TerminalError):
                policy.check(spec)
        else:
            policy.check(spec)
