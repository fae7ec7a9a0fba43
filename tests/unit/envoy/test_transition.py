"""The steps of a change: clusters, then routes, then the end of old clusters. In no order is a cluster missing."""

import itertools
from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from operator_app.envoy.files import CLUSTERS_FILE, Files, clusters_of, rendered, version_of
from operator_app.envoy.transition import next_files
from tests.unit.envoy import cases
from tests.unit.envoy.parts import documents

CLUSTERS = "cluster_manager.cds"


def to(*backends: str, port: int = 80) -> Files:
    """The files of a proxy with these backends, of which each has a route."""
    routes = [{"backend": name, "match": {"pathPrefix": f"/{name}"}} for name in backends]
    endpoints = [{"host": "10.0.0.7", "port": port}]
    return rendered(
        cases.spec(
            [cases.http(*routes), cases.tcp(backend=backends[0])],
            [{"name": name, "endpoints": endpoints} for name in backends],
        )
    )


def steps(before: Files, after: Files) -> list[Mapping[str, str]]:
    """The texts that follow each other in the ConfigMap if every Pod loads each of them."""
    found = [before.texts]
    while True:
        files = next_files(after, found[-1], lambda _: True, generation=2)
        if files.texts == found[-1]:
            return found
        found.append(files.texts)
        assert len(found) < 6


def used(texts: Mapping[str, str]) -> set[str]:
    """The clusters that the routes name."""
    (routes,) = documents(texts)["rds-http.json"]["resources"]
    return {route["route"]["cluster"] for host in routes["virtual_hosts"] for route in host["routes"]}


def known(texts: Mapping[str, str]) -> set[str]:
    """The clusters that there are."""
    return set(clusters_of(texts[CLUSTERS_FILE]) or ())


NAMES = st.lists(st.sampled_from(["a", "b", "c", "d"]), min_size=1, unique=True)


@given(NAMES, NAMES, st.sampled_from([80, 81]))
def test_no_step_takes_a_cluster_from_a_route(before: list[str], after: list[str], port: int) -> None:
    """Whatever file Envoy reads first, its routes of the step before and of this one have their clusters."""
    texts = steps(to(*before), to(*after, port=port))
    assert texts[-1] == to(*after, port=port).texts
    for old, new in itertools.pairwise(texts):
        assert used(old) <= known(new), "clusters are read before routes"
        assert used(new) <= known(old), "routes are read before clusters"


@pytest.mark.parametrize(
    ("before", "after", "count"),
    [
        (to("a"), to("a"), 0),
        (to("a"), to("a", port=81), 1),
        (to("a", "b"), to("b", "a"), 1),
        (to("a"), to("a", "b"), 2),
        (to("a", "b"), to("a"), 2),
        (to("a"), to("b"), 3),
    ],
    ids=["nothing", "endpoint", "order", "one more", "one less", "another"],
)
def test_a_change_takes_as_many_writes_as_it_needs(before: Files, after: Files, count: int) -> None:
    """One where no cluster comes or goes, and three where both do."""
    assert len(steps(before, after)) - 1 == count


def test_each_step_waits_for_the_one_before() -> None:
    """New routes wait for the clusters, the end of old clusters for the routes; each asks for what is stored."""
    before, after = to("a"), to("b")
    asked: list[Mapping[str, str]] = []

    def not_yet(versions: Mapping[str, str]) -> bool:
        asked.append(versions)
        return False

    first = next_files(after, before.texts, not_yet, generation=2)
    assert (used(first.texts), known(first.texts)) == ({"backend/a"}, {"backend/a", "backend/b", "listener/tcp"})
    assert asked == [], "what is added harms nobody"
    assert first.versions[CLUSTERS] == version_of(first.texts[CLUSTERS_FILE])
    assert next_files(after, first.texts, not_yet, generation=2).texts == first.texts
    assert asked == [{CLUSTERS: first.versions[CLUSTERS]}]

    second = next_files(after, first.texts, lambda _: True, generation=2)
    assert used(second.texts) == {"backend/b"}
    asked.clear()
    assert next_files(after, second.texts, not_yet, generation=2).texts == second.texts
    assert [set(each) for each in asked] == [set(after.versions)]
    assert next_files(after, second.texts, lambda _: True, generation=2) == after


@pytest.mark.parametrize("text", [None, "{}", "[]", "x", '{"resources": [{}]}'], ids=str)
def test_what_another_writer_has_made_of_the_clusters_is_replaced_at_once(text: str | None) -> None:
    """Without clusters that can be read there is nothing to break."""
    texts: dict[str, Any] = dict(to("a").texts)
    del texts[CLUSTERS_FILE]
    after = to("b")
    assert next_files(after, texts | ({CLUSTERS_FILE: text} if text else {}), lambda _: False, generation=2) == after


def test_files_that_do_not_fit_together_are_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """A ConfigMap that is too large would be refused, and the edit with it."""
    before, after = to("a"), to("b")
    monkeypatch.setattr("operator_app.envoy.transition.MAX_BYTES", 1000)
    assert next_files(after, before.texts, lambda _: False, generation=2) == after


class Mount:
    """A ConfigMap with a Pod whose kubelet skips writes and is late, and whose Envoy reads the files in any order."""

    def __init__(self, first: Files) -> None:
        self.declared = first
        self.generation = 1
        self.written: list[Mapping[str, str]] = [first.texts]
        self.read = 0

    def edit(self, to: Files) -> None:
        """Declare other files; the operator has not looked yet."""
        self.declared, self.generation = to, self.generation + 1

    def reconcile(self) -> None:
        """One look of the operator, which asks Envoy."""
        loaded = self.written[self.read]

        def have_loaded(versions: Mapping[str, str]) -> bool:
            return all(version_of(loaded[self.declared.names[stat]]) == version for stat, version in versions.items())

        files = next_files(self.declared, self.written[-1], have_loaded, generation=self.generation)
        if files.texts != self.written[-1]:
            self.written.append(files.texts)

    def deliver(self, skipped: int) -> None:
        """A later write reaches Envoy, if there is one; those between never do."""
        before = self.written[self.read]
        self.read = min(self.read + 1 + skipped, len(self.written) - 1)
        after = self.written[self.read]
        assert used(before) <= known(after), "clusters are read before routes"
        assert used(after) <= known(before), "routes are read before clusters"


ACTIONS = st.one_of(
    st.tuples(st.just("edit"), NAMES),
    st.just(("reconcile", None)),
    st.tuples(st.just("deliver"), st.integers(0, 3)),
)


STEP: list[tuple[str, Any]] = [("reconcile", None), ("deliver", 0)]
BACK: list[tuple[str, Any]] = [("edit", ["b"]), *STEP, *STEP, ("reconcile", None), ("edit", ["a"])]
"""To another cluster as far as the end of the old one, which is stored and not read; then back."""


@given(st.lists(ACTIONS, max_size=40))
@example([*BACK, ("reconcile", None), ("reconcile", None), ("deliver", 0), ("deliver", 1)])
@example([*STEP, *BACK, ("edit", ["b"]), ("reconcile", None), ("reconcile", None), ("deliver", 0), ("deliver", 1)])
def test_edits_that_overtake_each_other_take_no_cluster_from_a_route(actions: list[tuple[str, Any]]) -> None:
    """Whenever an edit comes and whichever writes reach Envoy: no route is without its cluster for a moment."""
    mount = Mount(to("a"))
    for what, value in actions:
        if what == "edit":
            mount.edit(to(*value))
        elif what == "reconcile":
            mount.reconcile()
        else:
            mount.deliver(value)
    for _ in range(4):
        mount.reconcile()
        mount.deliver(9)
    assert mount.written[-1] == mount.declared.texts, "what was declared last arrives"
