"""Random routes that overlap, for property tests."""

from typing import Any

from hypothesis import strategies as st

from operator_app.api.routes import Route

HOSTS = ("example.com", "shop.example.com", "a.shop.example.com", "other.org")

PATTERNS = (*HOSTS, "*.example.com", "*.shop.example.com", "*.com")

PATHS = ("/", "/api", "/api/v1", "/api/v1/users", "/apiary", "/health")

matches = st.fixed_dictionaries(
    {},
    optional={
        "hosts": st.lists(st.sampled_from(PATTERNS), min_size=1, max_size=4),
        "path": st.tuples(st.sampled_from(["pathPrefix", "pathExact"]), st.sampled_from([*PATHS, "/api/"])),
    },
)


@st.composite
def route_lists(draw: st.DrawFn) -> tuple[Route, ...]:
    """Routes that overlap; each has a backend of its own, which identifies the route that answers."""
    routes: list[dict[str, Any]] = []
    for position, drawn in enumerate(draw(st.lists(matches, min_size=1, max_size=8))):
        match = {"hosts": drawn.get("hosts", [])}
        if "path" in drawn:
            kind, path = drawn["path"]
            match[kind] = path
        routes.append({"backend": f"b{position}", "match": match})
    return tuple(Route.model_validate(route) for route in routes)
