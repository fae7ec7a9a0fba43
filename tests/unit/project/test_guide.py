"""Every manifest of docs/guide.md is valid, and the guide names every sample."""

import re
from typing import Final

import pytest
import yaml

from operator_app.api.crd import crds
from operator_app.api.kinds import ENVOY_PROXY, Object
from operator_app.api.models import parse_spec
from operator_app.desired import children
from tests.paths import ROOT
from tests.samples import samples, unknown_fields

GUIDE: Final = (ROOT / "docs" / "guide.md").read_text(encoding="utf-8")
BLOCKS: Final[list[Object]] = [
    yaml.safe_load(text) for text in re.findall(r"^```yaml\n(.*?)^```$", GUIDE, re.MULTILINE | re.DOTALL)
]
FIRST: Final = BLOCKS[0]
SCHEMA: Final[Object] = crds()[0]["spec"]["versions"][0]["schema"]["openAPIV3Schema"]


def whole(block: Object) -> Object:
    """A block as an EnvoyProxy: where it is a part of a spec, that of the first block with these members."""
    if "kind" in block:
        return block
    assert set(block) == {"spec"}, block
    return FIRST | {"spec": FIRST["spec"] | block["spec"]}


@pytest.mark.parametrize("number", range(len(BLOCKS)))
def test_every_manifest_is_valid(number: int) -> None:
    """Each is accepted with the first proxy's other fields, has no unknown field, and gives the operator's children."""
    proxy = whole(BLOCKS[number])
    assert (proxy["apiVersion"], proxy["kind"]) == (ENVOY_PROXY.api_version, ENVOY_PROXY.kind)
    assert [*unknown_fields(SCHEMA, proxy)] == []
    metadata = proxy["metadata"] | {"namespace": "team-a", "uid": "5d1b2f1e-0000-4000-8000-000000000001"}
    assert children(proxy | {"metadata": metadata}, parse_spec(proxy), default_image="envoy")


def test_the_first_is_the_smallest_sample() -> None:
    """Who follows the guide begins with what the tests apply."""
    assert FIRST["spec"] == samples()["minimal"]["spec"]


def test_it_leads_to_every_sample() -> None:
    """The table at its end has each sample once."""
    named = re.findall(r"\]\(\.\./manifests/samples/([\w-]+)\.yaml\)", GUIDE.partition("\n## Samples\n")[2])
    assert sorted(named) == sorted(samples())


def test_it_goes_from_the_first_proxy_to_autoscaling() -> None:
    """Beginning, HTTPS, canary and autoscaling are there, in this order."""
    fields = [str(block) for block in BLOCKS]
    places = [
        next(n for n, text in enumerate(fields) if name in text) for name in ("'tls'", "'weight'", "'autoscaling'")
    ]
    assert places == sorted(places)
    assert places[0] > 0
