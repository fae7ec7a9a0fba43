"""What one Envoy says it has loaded, read off the statistics that ``envoy.internal.LOADED_PATH`` answers. Pure."""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Final

MAX_ANSWER_BYTES: Final = 256 * 1024
"""Of an answer; the names of as many Secrets as a spec can name take less than half of it."""

MOST_WORDS: Final = 400
"""Of what an Envoy says of a refusal, in characters from the end, which is where the reason stands."""

_REFUSED: Final = re.compile(r"config update (?:rejected|failure): (.+?)(?=\n\[\d{4}-|\n\{|\Z)", re.DOTALL)
"""In Envoy's log, up to the next entry of it or of the access log."""

_NOISE: Final = re.compile(r"goo\.gle/debug\w+")
"""With which Envoy marks texts that nobody shall parse."""

_VERSION: Final = ".version_text"
_SECRET: Final = re.compile(r"sds\.(?P<name>.+)\.(?P<what>update_success|key_rotation_failed)")
_KNOWN: Final = re.compile(r".+?\.ssl\.certificate\.(?P<name>.+)\.expiration_unix_time_seconds")
_REFUSALS: Final = (".update_rejected", ".update_failure")
_WARMING: Final = frozenset({"cluster_manager.warming_clusters", "listener_manager.total_listeners_warming"})


@dataclass(frozen=True, slots=True)
class SecretUse:
    """What an Envoy has made of one Secret.

    ``reads`` are how often it has looked at what is mounted, but for the first time if that could not be used, and
    ``refusals`` how often it could not use what it found then. ``is_known``: something that needs it knows a
    certificate of it, whether it serves or not.
    """

    is_known: bool = False
    reads: int = 0
    refusals: int = 0

    @property
    def was_used(self) -> bool:
        """Whether it could be used at least once since Envoy's start; what is refused later leaves that in place."""
        return self.reads > self.refusals


@dataclass(frozen=True, slots=True)
class Answer:
    """``versions`` that are loaded, and how many updates were refused or could not be read since Envoy's start.

    Both by the prefix of the statistics about a file. ``warming`` clusters and listeners are loaded and do not serve
    yet. ``secrets`` are by Envoy's names for them.
    """

    versions: Mapping[str, str]
    refusals: Mapping[str, int]
    warming: int
    secrets: Mapping[str, SecretUse] = field(default_factory=dict)

    def has(self, versions: Mapping[str, str]) -> bool:
        """Whether these versions are loaded, of the files that this Envoy reads, and everything serves."""
        return not self.warming and all(
            self.versions.get(stat, version) == version for stat, version in versions.items()
        )

    def unusable(self, names: Iterable[str]) -> list[str]:
        """Those of these Secrets that nothing can serve with, by Envoy's names, in order.

        A listener that needs two of them serves with neither until both are right; the one that is wrong is told. An
        Envoy before 1.40 does not look at one again that it could not use the first time, so it never knows it.
        """
        uses = {name: self.secrets.get(name, SecretUse()) for name in sorted(names)}
        unused = [name for name, use in uses.items() if not use.was_used]
        return unused or [name for name, use in uses.items() if not use.is_known]


def parsed(text: str) -> Answer:
    """The answer in ``text``: lines of ``name: value``, where texts are quoted.

    Raises ``ValueError`` if it is anything else: what answered is not the Envoy of a proxy.
    """
    versions: dict[str, str] = {}
    refusals: dict[str, int] = {}
    secrets: dict[str, SecretUse] = {}
    warming = 0
    for line in text.splitlines():
        name, separator, value = line.partition(": ")
        if not separator:
            raise ValueError(f"{line[:80]!r} is no statistic")
        secret = _secret(name, value, secrets)
        if secret is not None:
            secrets |= secret
        elif name.endswith(_VERSION):
            versions[name.removesuffix(_VERSION)] = value.strip('"')
        elif name in _WARMING:
            warming += int(value)
        else:
            prefix = next((name.removesuffix(each) for each in _REFUSALS if name.endswith(each)), None)
            if prefix is not None:
                refusals[prefix] = refusals.get(prefix, 0) + int(value)
    if not versions:
        raise ValueError("no version of any file")
    return Answer(versions, refusals, warming, secrets)


def refusal_in(log: str) -> str:
    """Why an Envoy has refused a file the last time, by its log; empty where that does not say.

    What it says of Secrets does not count: that is not about a file of the ConfigMap.
    """
    about_files = [words for words in _REFUSED.findall(log) if "/etc/envoy-" not in words]
    if not about_files:
        return ""
    words = " ".join(_NOISE.sub("", about_files[-1]).split())
    return words if len(words) <= MOST_WORDS else f"... {words[-MOST_WORDS:]}"


def _secret(statistic: str, value: str, known: Mapping[str, SecretUse]) -> Mapping[str, SecretUse] | None:
    """What one statistic says of a Secret, added to what is known of it; ``None`` if it is about something else."""
    found = _KNOWN.fullmatch(statistic)
    if found is not None:
        return {found["name"]: replace(known.get(found["name"], SecretUse()), is_known=True)}
    found = _SECRET.fullmatch(statistic)
    if found is None:
        return None
    use = known.get(found["name"], SecretUse())
    is_read = found["what"] == "update_success"
    return {found["name"]: replace(use, reads=int(value)) if is_read else replace(use, refusals=int(value))}
