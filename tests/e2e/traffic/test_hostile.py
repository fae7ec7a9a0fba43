"""Values that look like Envoy's own language mean nothing but their letters. No Kubernetes is needed."""

import tempfile
from pathlib import Path

import pytest

from tests.api_cases import edited, proxy
from tests.e2e.envoy.envoy_process import NEEDS_ENVOY, EnvoyProcess
from tests.e2e.traffic.servers import ask, serving
from tests.hostile_specs import HARMLESS
from tests.unit.envoy import cases

pytestmark = [NEEDS_ENVOY, pytest.mark.traffic]

CONDITIONS = ("match", "access", "rateLimit", "mirror", "retries", "hostRewrite", "prefixRewrite")


def test_harmless_specs_are_served_to_the_letter() -> None:
    """Header values, texts, matches and origins of the corpus are compared and sent as they are written."""
    with serving("app") as app:
        listeners = []
        for number, (at, value) in enumerate(HARMLESS.values()):
            listener = edited(proxy(), at, value)["spec"]["listeners"][0]
            kept = [
                {name: each for name, each in route.items() if name not in CONDITIONS} for route in listener["routes"]
            ]
            by_path = [{**route, "match": {"pathPrefix": f"/{n}"}} for n, route in enumerate(kept)]
            by_path[1] = listener["routes"][1] | {"match": listener["routes"][1]["match"] | {"pathPrefix": "/1"}}
            for route in by_path:
                if "backends" in route:
                    route["backends"] = [{"name": "app"}]
                if "redirect" in route:
                    route["redirect"] = {"path": "/elsewhere"}
            listeners.append(cases.http(*by_path, name=f"l{number}", port=8080 + number))
        spec = cases.spec(listeners, [app.declared()])
        with tempfile.TemporaryDirectory() as directory, EnvoyProcess(spec, Path(directory)) as proxy_:
            for number, (what, (at, value)) in enumerate(HARMLESS.items()):
                name = f"l{number}"
                if at[-1] == "value":
                    app.requests.clear()
                    assert ask(proxy_, name, "/0").status == 200, what
                    assert app.requests[0].values("x-env") == [value], what
                elif at[-1] == "response":
                    assert isinstance(value, dict)
                    assert ask(proxy_, name, "/3").body == value["body"], what
                elif at[-1] == "headers":
                    assert isinstance(value, list)
                    assert ask(proxy_, name, "/1", headers=[("x-a", "/1")]).status == 404, what
                    assert ask(proxy_, name, "/1", headers=[("x-a", value[0]["value"])]).status == 200, what
                else:
                    for origin in ("https://a.example.com", "https://evil.test"):
                        found = ask(proxy_, name, "/0", headers=[("origin", origin)])
                        assert found.value("access-control-allow-origin") is None, what
