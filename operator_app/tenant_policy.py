"""What the platform lets tenants declare, by settings of the operator. Pure.

The schema says what is valid in every cluster, this module what is allowed in this one. A spec that is not allowed is
refused as a whole, with a sentence that says what is allowed; what runs for it goes on running.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from ipaddress import ip_address, ip_network
from typing import Final

from operator_app.api.models import EnvoyProxySpec, ServiceType
from operator_app.errors import TerminalError

NOT_ALLOWED: Final = "NotAllowed"
"""The reason of a refusal."""


OPTIONAL_FIELDS: Final = {
    str(field.alias): name
    for name, field in EnvoyProxySpec.model_fields.items()
    if not field.is_required() and not field.get_default(call_default_factory=True)
}
"""Members of a spec that are absent or empty unless a tenant writes them: name in the spec to name in the model."""


@dataclass(frozen=True, slots=True)
class TenantPolicy:
    """What is allowed. An empty tuple of images or annotation prefixes allows all.

    ``forbidden_fields`` are names of members of the spec, of ``OPTIONAL_FIELDS``, that must be left out or empty.
    ``images`` are beginnings of image references that end where a part of the reference does; ``forbidden_networks``
    are ranges of addresses, in CIDR notation, that no backend may be in. A name that resolves to such an address is for
    the network to stop: a NetworkPolicy, or a rule of the nodes.
    """

    images: tuple[str, ...] = ()
    service_types: tuple[str, ...] = tuple(each.value for each in ServiceType)
    annotation_prefixes: tuple[str, ...] = ()
    forbidden_networks: tuple[str, ...] = ()
    forbidden_fields: tuple[str, ...] = ()

    def check(self, spec: EnvoyProxySpec) -> None:
        """Raise ``TerminalError`` with the reason ``NotAllowed`` and the first thing that is not allowed."""
        for message in self._refusals(spec):
            raise TerminalError(NOT_ALLOWED, message)

    def _refusals(self, spec: EnvoyProxySpec) -> Iterator[str]:
        if spec.image is not None and self.images and not any(_is_below(spec.image, each) for each in self.images):
            allowed = ", ".join(self.images)
            yield f"spec.image: {spec.image} is not allowed here: use one from {allowed}, or leave it out"
        if spec.service.type.value not in self.service_types:
            allowed = " or ".join(self.service_types)
            yield f"spec.service.type: {spec.service.type.value} is not allowed here: use {allowed}"
        for name in self.forbidden_fields:
            if getattr(spec, OPTIONAL_FIELDS[name]):
                yield f"spec.{name}: is not allowed here: use a spec without it, or ask who runs the operator"
        yield from self._annotations("service.annotations", spec.service.annotations)
        yield from self._annotations("podAnnotations", spec.pod_annotations)
        yield from self._addresses(spec)

    def _annotations(self, field: str, annotations: dict[str, str]) -> Iterator[str]:
        for key in annotations:
            if self.annotation_prefixes and not key.startswith(self.annotation_prefixes):
                allowed = ", ".join(self.annotation_prefixes)
                yield f"spec.{field}: {key} is not allowed here: use keys that begin with {allowed}"

    def _addresses(self, spec: EnvoyProxySpec) -> Iterator[str]:
        networks = [ip_network(each) for each in self.forbidden_networks]
        for backend in spec.backends:
            for endpoint in backend.addresses:
                try:
                    address = ip_address(endpoint.host)
                except ValueError:
                    continue
                for network in (each for each in networks if each.version == address.version and address in each):
                    yield (
                        f"spec.backends: {endpoint.host} of {backend.name} is in {network}, where no backend may be: "
                        "name a Service or another address"
                    )


def _is_below(image: str, prefix: str) -> bool:
    """Whether ``prefix`` is a beginning of ``image`` that ends where a part of the reference ends."""
    rest = image.removeprefix(prefix) if image.startswith(prefix) else None
    return rest is not None and (not rest or prefix.endswith(("/", ":")) or rest[0] in "/:@")
