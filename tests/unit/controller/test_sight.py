"""When a replica counts as blind, in virtual time."""

from operator_app.api.kinds import CONFIG_MAP, SERVICE
from operator_app.controller.sight import Sight


def test_the_longest_silent_watch_of_a_kind_counts() -> None:
    """Watches of other namespaces or kinds that deliver do not hide one that does not."""
    sight = Sight(300)
    assert sight.stale(1e9) is None
    sight.record((CONFIG_MAP, "a"), now_mono=100)
    sight.record((CONFIG_MAP, "b"), now_mono=100)
    sight.record((SERVICE, None), now_mono=100)
    sight.record((CONFIG_MAP, "b"), now_mono=399)
    sight.record((SERVICE, None), now_mono=390)
    assert sight.silent_s(399) == {CONFIG_MAP: 299, SERVICE: 9}
    assert sight.stale(399) is None
    assert sight.stale(400) == (CONFIG_MAP, 300)
    sight.record((CONFIG_MAP, "a"), now_mono=400)
    assert sight.stale(400) is None
