"""What one Envoy says it has loaded, read off the statistics that ``envoy.internal.LOADED_PATH`` answers. Pure."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

MAX_ANSWER_BYTES: Final = 64 * 1024
"""Of an answer; sixteen listeners take less than a tenth of it."""

_VERSION: Final = ".version_text"
_REFUSALS: Final = (".update_rejected", ".update_failure")
_WARMING: Final = frozenset({"cluster_manager.warming_clusters", "listener_manager.total_listeners_warming"})


@dataclass(frozen=True, slots=True)
class Answer:
    """``versions`` that are loaded, and how many updates were refused or could not be read since Envoy's start.

    Both by the prefix of the statistics about a file. ``warming`` clusters and listeners are loaded and do not serve
    yet.
    """

    versions: Mapping[str, str]
    refusals: Mapping[str, int]
    warming: int

    def has(self, versions: Mapping[str, str]) -> bool:
        """Whether these versions are loaded, of the files that this Envoy reads, and everything serves."""
        return not self.warming and all(
            self.versions.get(stat, version) == version for stat, version in versions.items()
        )


def parsed(text: str) -> Answer:
    """The answer in ``text``: lines of ``name: value``, where texts are quoted.

    Raises ``ValueError`` if it is anything else: what answered is not the Envoy of a proxy.
    """
    versions: dict[str, str] = {}
    refusals: dict[str, int] = {}
    warming = 0
    for line in text.splitlines():
        name, separator, value = line.partition(": ")
        if not separator:
            raise ValueError(f"{line[:80]!r} is no statistic")
        if name.endswith(_VERSION):
            versions[name.removesuffix(_VERSION)] = value.strip('"')
        elif name in _WARMING:
            warming += int(value)
        else:
            prefix = next((name.removesuffix(each) for each in _REFUSALS if name.endswith(each)), None)
            if prefix is not None:
                refusals[prefix] = refusals.get(prefix, 0) + int(value)
    if not versions:
        raise ValueError("no version of any file")
    return Answer(versions, refusals, warming)
