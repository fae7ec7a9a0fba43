"""What is remembered of one proxy's Pods between two reconciles. Pure: the time is a parameter.

Nothing of it is needed after a restart: the ConfigMap has the files, the Pods have their annotations, and Envoy is
asked again. What is lost is the text to which a refused configuration is taken back; Envoy goes on serving that.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from operator_app.dataplane.answers import Answer
from operator_app.dataplane.pods import Pod
from operator_app.envoy import internal
from operator_app.envoy.files import Files

WAITS_S: Final = (0.2, 0.1, 0.1, 0.2, 0.2, 0.5, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0)
"""Seconds between two looks at Pods that have not loaded what they should, and the last of them from then on.

A kubelet that was made to look takes 0.3 s, and one that was not up to 90 s.
"""

UNREACHABLE_WAITS_S: Final = (1.0, 2.0, 5.0, 10.0, 30.0, 60.0)
"""Seconds until a Pod that could not be asked is asked again, and the last of them from then on."""

SECRET_WAITS_S: Final = (1.0, 2.0, 5.0, 10.0, 30.0)
"""Seconds between two looks at Pods that can't use a Secret, and the last of them from then on. Envoy itself waits for
none of them: what needs the Secret serves as soon as the kubelet has brought it."""

STEP_TIMEOUT_S: Final = 10.0
"""After this the next step of a change is taken though not every Pod has the last one: a backend's name that does not
resolve, or a Pod that can't be asked, holds no edit for ever."""


@dataclass(slots=True)
class Asked:
    """What one Pod has answered last, and when, or why it did not. ``is_fresh``: nothing was written since.

    ``refused_secrets`` are those, by Envoy's names, whose last change could not be used.
    """

    answer: Answer | None = None
    answered_at_mono: float = 0.0
    is_fresh: bool = False
    refused_secrets: set[str] = field(default_factory=set)
    error: str | None = None
    failures: int = 0
    again_at_mono: float = 0.0

    def answered(self, answer: Answer, *, now_mono: float) -> None:
        """Remember an answer."""
        for name, use in answer.secrets.items():
            before = self.answer.secrets.get(name) if self.answer is not None else None
            if before is not None:
                refusals, reads = use.refusals - before.refusals, use.reads - before.reads
                # Of several in between, the last one may have been right: then nothing is told.
                if 0 < reads <= refusals:
                    self.refused_secrets.add(name)
                elif reads:
                    self.refused_secrets.discard(name)
        self.answer, self.is_fresh, self.error, self.failures, self.again_at_mono = answer, True, None, 0, 0.0
        self.answered_at_mono = now_mono

    def unusable_secrets(self, names: Iterable[str]) -> list[str]:
        """Those of these Secrets that this Pod can't use as they are now, by Envoy's names, in order."""
        if self.answer is None:
            return []
        return self.answer.unusable(names) or sorted(self.refused_secrets.intersection(names))

    def failed(self, error: str, *, now_mono: float) -> None:
        """Remember that it could not be asked, and when to try again."""
        self.error, self.is_fresh = error, False
        self.again_at_mono = now_mono + UNREACHABLE_WAITS_S[min(self.failures, len(UNREACHABLE_WAITS_S) - 1)]
        self.failures += 1


@dataclass(frozen=True, slots=True)
class Refusal:
    """Files that an Envoy has refused, by their digest and the proxy's generation, and the texts before them.

    ``words`` are Envoy's, empty where they could not be read.
    """

    digest: str
    generation: int
    pod: str
    file: str
    texts: Mapping[str, str]
    words: str


@dataclass(slots=True)
class Memory:
    """What is remembered of one proxy.

    ``previous`` are texts that were replaced by ones that not every Pod has loaded yet; ``round_of`` is the digest of
    the files that are waited for, and ``rounds`` how often their Pods were looked at, and ``secret_rounds`` how often
    for a Secret; ``waiting`` are the versions that a step waits for, and since when. ``written`` has the version of
    each file that was stored last, and when; ``stored`` is what tells the contents of the last ConfigMap that held from
    others in this process, 0 before the first.
    """

    uid: str
    asked: dict[str, Asked] = field(default_factory=dict)
    previous: dict[str, str] = field(default_factory=dict)
    refusal: Refusal | None = None
    round_of: str = ""
    rounds: int = 0
    secret_rounds: int = 0
    waiting: tuple[tuple[tuple[str, str], ...], float] | None = None
    written: dict[str, tuple[str, float]] = field(default_factory=dict)
    stored: int = 0

    def keep_only(self, pods: Sequence[Pod]) -> None:
        """Forget Pods that are gone."""
        uids = {pod.uid for pod in pods}
        for uid in self.asked.keys() - uids:
            del self.asked[uid]

    def expire(self) -> None:
        """Let every Pod be asked again, since what it has read may be something else by now."""
        for asked in self.asked.values():
            asked.is_fresh = False

    def has_loaded(self, pod: Pod, versions: Mapping[str, str], revision: str) -> bool:
        """Whether a Pod has said that it has loaded these versions, of the files that its revision reads."""
        asked = self.asked.get(pod.uid)
        if asked is None or asked.answer is None or not asked.is_fresh:
            return False
        is_other = pod.revision != revision
        wanted = {stat: each for stat, each in versions.items() if not (is_other and stat == internal.LISTENERS_STAT)}
        return asked.answer.has(wanted)

    def step_is_over(self, pods: Sequence[Pod], versions: Mapping[str, str], revision: str, *, now_mono: float) -> bool:
        """Whether all of ``pods`` have loaded these versions, or were waited for long enough."""
        if all(self.has_loaded(pod, versions, revision) for pod in pods):
            return True
        waited_for = tuple(sorted(versions.items()))
        if self.waiting is None or self.waiting[0] != waited_for:
            self.waiting = waited_for, now_mono
        return now_mono - self.waiting[1] >= STEP_TIMEOUT_S

    def was_written_long_ago(self, versions: Mapping[str, str], *, now_mono: float) -> bool:
        """Whether these versions were stored so long ago that kubelets which were touched have brought them."""
        times = (self.written.get(stat, ("", 0.0)) for stat in versions)
        return all(
            version != versions[stat] or now_mono - at_mono >= STEP_TIMEOUT_S
            for stat, (version, at_mono) in zip(versions, times, strict=True)
        )

    def is_secret_due(self, pod: Pod, files: Files, *, now_mono: float) -> bool:
        """Whether to ask a Pod again that could not use a Secret, the last time that it was asked."""
        asked = self.asked.get(pod.uid)
        if asked is None or pod.revision != files.revision or not asked.unusable_secrets(files.secrets):
            return False
        return now_mono - asked.answered_at_mono >= self.secret_wait_s

    @property
    def secret_wait_s(self) -> float:
        """In how many seconds to look again at Pods that can't use a Secret."""
        return SECRET_WAITS_S[min(max(self.secret_rounds, 1), len(SECRET_WAITS_S)) - 1]

    def begin_round(self, files: Files) -> float:
        """Count one more look at Pods that lack ``files``; returns in how many seconds to look again."""
        if self.round_of != files.digest:
            self.round_of, self.rounds = files.digest, 0
        self.rounds += 1
        return WAITS_S[min(self.rounds, len(WAITS_S)) - 1]


def refused_file(before: Answer | None, now: Answer, files: Files) -> str | None:
    """The file that an Envoy has refused between two answers, if there is one among those that it lacks."""
    if before is None:
        return None
    for stat, version in files.versions.items():
        grown = now.refusals.get(stat, 0) > before.refusals.get(stat, 0)
        if grown and now.versions.get(stat, version) != version:
            return files.names[stat]
    return None
