"""Brings the files of a ConfigMap into the Envoys of a proxy, and says what these have loaded.

A kubelet looks at a mounted ConfigMap every 60 to 90 s, and at once when its Pod changes. So a serving Pod that lacks
the files is *touched*: one annotation, written to the ``status`` subresource, which discards changes of anything that
a Pod does. It is written once for each Pod and content, and never where Envoy says that it has loaded the content.

Guarantees
    - Nothing is written and nobody is asked once every serving Pod has said that it has loaded the files, and serves
      with the Secrets that they name.
    - A Pod that can't be asked is asked ever more rarely, and holds no reconcile for longer than one question.
    - Files that an Envoy refuses are taken back to those before, for all Pods, until the declaration changes.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Final

import anyio
import structlog

from operator_app.api.kinds import ANNOTATION_CONFIGURATION, CONFIG_MAP, POD, Key, Kind, Object, key_of
from operator_app.apply import Result
from operator_app.dataplane.answers import Answer, refusal_in
from operator_app.dataplane.asking import Ask, UnreachableError
from operator_app.dataplane.memory import Asked, Memory, Refusal, refused_file
from operator_app.dataplane.pods import Pod, pod_of
from operator_app.desired import CONTAINER_NAME, controller_uid
from operator_app.envoy.files import Files, version_of, with_texts
from operator_app.envoy.secrets import CERTIFICATE_PREFIX
from operator_app.envoy.transition import next_files
from operator_app.errors import ConflictError, NotFoundError, OperatorError
from operator_app.kube.client import Cluster
from operator_app.kube.store import Store
from operator_app.results import NOT_ASKED, Outcome, Programming
from operator_app.ssa.fields import fields_of

log = structlog.get_logger(__name__)

_NO_POD: Final = Programming(
    is_true=False, reason="NoServingPod", message="no proxy serves yet, so none can say what it has loaded"
)

_NOT_ASKED: Final = Programming(
    is_true=None,
    reason=NOT_ASKED,
    message="OPERATOR_APP_ASK_PODS is off, so no Envoy is asked what it has loaded",
)
_NOT_WRITTEN: Final = Programming(
    is_true=False, reason="ConfigMapNotReady", message="the ConfigMap does not have the declared configuration yet"
)
_LOADED: Final = Programming(is_true=True, reason="Loaded", message="every serving proxy has loaded the configuration")

LOG_LINES: Final = 2_000
MAX_LOG_BYTES: Final = 1024 * 1024
"""Of a log, once for each refusal: what a proxy under a thousand requests a second writes within a second or two."""

MAX_PODS: Final = 256
"""Pods of one proxy that are looked at: more than the replicas of a proxy twice over, and anybody can label a Pod."""


MAX_ASKED_IN_TURN: Final = 8
"""Pods of one proxy that are asked at once after they were touched."""


class DataPlane:
    """The Pods of all proxies. One instance for the operator; different proxies may be worked on at the same time.

    ``ask`` asks one Pod; without it none is asked, and every serving Pod is touched once for each content. ``mono`` is
    a monotonic clock in seconds.
    """

    def __init__(
        self,
        cluster: Cluster,
        store: Store,
        ask: Ask | None,
        *,
        on_write: Callable[[Kind, Outcome], None],
        mono: Callable[[], float],
    ) -> None:
        self._cluster = cluster
        self._store = store
        self._ask = ask
        self._on_write = on_write
        self._mono = mono
        self._memories: dict[Key, Memory] = {}

    def next_step(self, proxy: Object, live: Mapping[Kind, Object | None]) -> Callable[[Files], Files]:
        """What gives the files to store now on the way to those that ``proxy`` declares; it may run in a thread.

        ``live`` are the known children.
        """
        memory, serving = self._memory(proxy), self._serving(proxy)
        texts = _own_texts(proxy, live.get(CONFIG_MAP))
        generation, now_mono = proxy["metadata"]["generation"], self._mono()

        def step(files: Files) -> Files:
            pods = [pod for pod in serving if files.are_read_by(pod.revision)]
            if not pods or not texts:
                memory.previous.clear()
                memory.refusal = None
                return files
            refusal = memory.refusal
            if refusal is not None and (refusal.digest, refusal.generation) == (files.digest, generation):
                return with_texts(files, {**texts, **refusal.texts})
            memory.refusal = None

            def have_loaded(versions: Mapping[str, str]) -> bool:
                if self._ask is None:
                    return memory.was_written_long_ago(versions, now_mono=now_mono)
                return memory.step_is_over(pods, versions, files.revision, now_mono=now_mono)

            found = next_files(files, texts, have_loaded, generation=generation)
            for name, text in found.texts.items():
                if name in texts and texts[name] != text:
                    memory.previous.setdefault(name, texts[name])
            for stat, version in found.versions.items():
                if version_of(texts.get(found.names[stat], "")) != version:
                    memory.written[stat] = version, now_mono
            return found

        return step

    async def program(
        self, proxy: Object, files: Files, target: Files, config_map: Result, *, is_resync: bool
    ) -> Programming:
        """Ask the serving Pods of ``proxy`` and touch those that lack ``target``, which is on the way to ``files``.

        ``config_map`` is what became of the ConfigMap: while it does not hold ``target``, nobody is touched. Pods that
        have answered are asked again after it was written, and with ``is_resync``.
        """
        memory, serving = self._memory(proxy), self._serving(proxy)
        memory.keep_only(serving)
        if not serving:
            return _NO_POD if self._ask is not None else _NOT_ASKED
        pods = [pod for pod in serving if files.are_read_by(pod.revision)]
        is_written = config_map.problem is None and config_map.live is not None
        if is_resync or config_map.outcome in (Outcome.CREATED, Outcome.CONFIGURED):
            memory.expire()
        token = _token(target, config_map.live if self._ask is not None else None)
        lacking = [pod for pod in pods if not memory.has_loaded(pod, target.versions, target.revision)]
        if self._ask is not None:
            due = [pod for pod in pods if memory.is_secret_due(pod, files, now_mono=self._mono())]
            untouched = [pod for pod in lacking if pod.configuration != token]
            await self._ask_all(proxy, memory, dict.fromkeys((*untouched, *due)), files, target)
            touched = [pod for pod in lacking if pod.configuration == token]
            await self._ask_in_turn(proxy, memory, touched, files, target)
            lacking = [pod for pod in pods if not memory.has_loaded(pod, target.versions, target.revision)]
        if not is_written:
            return _NOT_WRITTEN if lacking or target.digest != files.digest else _LOADED
        missed, trouble = await self._touch_all(lacking, token)
        if self._ask is None:
            is_over = target.digest == files.digest and not missed
            message = _NOT_ASKED.message + (_untouched(trouble) if trouble is not None else "")
            return replace(_NOT_ASKED, message=message, requeue_after_s=None if is_over else memory.begin_round(target))
        return self._programming(proxy, memory, serving, lacking, files, target, trouble)

    def is_next(self, proxy: Object, config_map: Object) -> bool:
        """Whether the operator itself declares other contents than those that held last, as each step of a change does.

        What such a write changes is no repair, although the generation is the one before; unknown after a restart.
        """
        return self._memory(proxy).stored not in (0, _hash_of(config_map))

    def hold(self, proxy: Object, config_map: Object) -> None:
        """Remember that the ConfigMap has the declared contents."""
        self._memory(proxy).stored = _hash_of(config_map)

    def forget(self, key: Key) -> None:
        """Drop what is remembered of a proxy that is gone."""
        self._memories.pop(key, None)

    def _memory(self, proxy: Object) -> Memory:
        key, uid = key_of(proxy), proxy["metadata"]["uid"]
        memory = self._memories.get(key)
        if memory is None or memory.uid != uid:
            memory = self._memories[key] = Memory(uid)
        return memory

    def _serving(self, proxy: Object) -> list[Pod]:
        pods = map(pod_of, self._store.indexed(POD, proxy["metadata"]["uid"]))
        namespace = proxy["metadata"]["namespace"]
        serving = (pod for pod in pods if pod.is_serving and pod.key.namespace == namespace)
        return sorted(serving, key=lambda pod: pod.key)[:MAX_PODS]

    async def _ask_all(self, proxy: Object, memory: Memory, pods: Iterable[Pod], files: Files, target: Files) -> None:
        async def ask(pod: Pod, asked: Asked) -> None:
            assert self._ask is not None  # noqa: S101 - the caller has looked
            try:
                answer = await self._ask(pod.ip)
            except UnreachableError as error:
                asked.failed(str(error), now_mono=self._mono())
                return
            refused = refused_file(asked.answer, answer, target)
            asked.answered(answer, now_mono=self._mono())
            if refused is not None and memory.previous and memory.refusal is None:
                generation, texts = proxy["metadata"]["generation"], dict(memory.previous)
                memory.refusal = Refusal(files.digest, generation, pod.key.name, refused, texts, words="")
                words = await self._words(pod)
                memory.refusal = replace(memory.refusal, words=words)
                log.warning(
                    "configuration_refused", proxy=str(key_of(proxy)), pod=pod.key.name, file=refused, why=words
                )

        now_mono = self._mono()
        async with anyio.create_task_group() as tasks:
            for pod in pods:
                asked = memory.asked.setdefault(pod.uid, Asked())
                if asked.again_at_mono <= now_mono:
                    tasks.start_soon(ask, pod, asked)

    async def _ask_in_turn(
        self, proxy: Object, memory: Memory, pods: Iterable[Pod], files: Files, target: Files
    ) -> None:
        """Ask Pods that were touched, a few at a time, as long as all of these have loaded ``target``.

        Those that were asked longest ago come first. Nothing but their answers is waited for, and each question takes
        a share of the processors on which Pods load their files, so many at once would delay what they ask about.
        """
        now_mono = self._mono()
        known = {pod: memory.asked.setdefault(pod.uid, Asked()) for pod in pods}
        waiting = sorted(
            (pod for pod, asked in known.items() if asked.again_at_mono <= now_mono),
            key=lambda pod: known[pod].answered_at_mono,
        )
        for begin in range(0, len(waiting), MAX_ASKED_IN_TURN):
            asked_now = waiting[begin : begin + MAX_ASKED_IN_TURN]
            await self._ask_all(proxy, memory, asked_now, files, target)
            if not all(memory.has_loaded(pod, target.versions, target.revision) for pod in asked_now):
                return

    async def _words(self, pod: Pod) -> str:
        """Why an Envoy has refused a file, in its words; empty where its log can't be read or does not say."""
        try:
            text = await self._cluster.log_of(
                pod.key, container=CONTAINER_NAME, lines=LOG_LINES, most_bytes=MAX_LOG_BYTES
            )
        except OperatorError as error:
            log.warning("log_not_read", pod=str(pod.key), error=str(error))
            return ""
        return refusal_in(text)

    async def _touch_all(self, pods: Sequence[Pod], token: str) -> tuple[int, str | None]:
        """Touch the Pods that do not carry ``token`` yet.

        Returns how many of them still don't, as far as is known, and what kept one from it.
        """
        missed: list[Key] = []
        troubles: list[str] = []

        async def touch(pod: Pod) -> None:
            annotations = {ANNOTATION_CONFIGURATION: token}
            patch = {"metadata": {"uid": pod.uid, "annotations": annotations}}
            try:
                live = await self._cluster.merge_patch(POD, pod.key, patch, subresource="status")
            except (ConflictError, NotFoundError):
                missed.append(pod.key)  # this Pod is gone most likely, and its successor starts with the new files
                return
            except OperatorError as error:
                missed.append(pod.key)
                troubles.append(f"Pod {pod.key.name} can't be touched: {error}")
                return
            self._on_write(POD, Outcome.CONFIGURED)
            self._store.learn(POD, live)

        async with anyio.create_task_group() as tasks:
            for pod in pods:
                if pod.configuration != token:
                    tasks.start_soon(touch, pod)
        return len(missed), troubles[0] if troubles else None

    def _programming(
        self,
        proxy: Object,
        memory: Memory,
        pods: Sequence[Pod],
        lacking: Sequence[Pod],
        files: Files,
        target: Files,
        trouble: str | None,
    ) -> Programming:
        if memory.refusal is not None and memory.refusal.generation == proxy["metadata"]["generation"]:
            is_taken_back = target.digest != files.digest and not lacking
            wait_s = None if is_taken_back else 0.0 if target.digest == files.digest else memory.begin_round(target)
            return _refused(memory.refusal, proxy["metadata"]["namespace"], wait_s)
        if lacking:
            return self._lacking(memory, lacking, target, trouble)
        if target.digest != files.digest:
            return Programming(
                is_true=False,
                reason="Loading",
                message="old and new backends are loaded; the next step follows",
                requeue_after_s=0.0,
            )
        memory.previous.clear()
        memory.waiting = None
        return self._unusable(memory, pods, files) or _older(pods, files) or _LOADED

    def _unusable(self, memory: Memory, pods: Sequence[Pod], files: Files) -> Programming | None:
        """The answer while a Pod of the current template can't use a Secret, if one can't."""
        for pod in pods:
            asked = memory.asked.get(pod.uid)
            if asked is None or asked.answer is None or pod.revision != files.revision:
                continue
            unusable = asked.unusable_secrets(files.secrets)
            if unusable:
                memory.secret_rounds += 1
                found = "; ".join(_about_secret(asked.answer, name, files.secrets[name]) for name in unusable)
                message = f"Pod {pod.key.name} {found}. All else serves. Why: kubectl logs -n {pod.key.namespace} "
                return Programming(
                    is_true=False,
                    reason="InvalidCertificateRef",
                    message=message + pod.key.name,
                    requeue_after_s=memory.secret_wait_s,
                )
        memory.secret_rounds = 0
        return None

    def _lacking(self, memory: Memory, lacking: Sequence[Pod], target: Files, trouble: str | None) -> Programming:
        """The answer while some Pods lack the files, or have not said that they have them."""
        silent = [(pod, memory.asked[pod.uid]) for pod in lacking if memory.asked[pod.uid].error is not None]
        wait_s = memory.begin_round(target)
        if len(silent) == len(lacking):
            pod, asked = silent[0]
            again_s = max(0.1, min(each.again_at_mono for _, each in silent) - self._mono())
            message = f"Pod {pod.key.name} can't be asked at {pod.ip}: {asked.error}"
            return Programming(is_true=None, reason="PodUnreachable", message=message, requeue_after_s=again_s)
        waiting = [pod for pod in lacking if memory.asked[pod.uid].error is None]
        # Of Pods that are asked in turn, one that has answered: what the others have loaded is not known.
        behind = next((pod for pod in waiting if memory.asked[pod.uid].is_fresh), waiting[0])
        message = f"Pod {behind.key.name} has not loaded the configuration yet"
        if len(waiting) > 1:
            message += f", and {len(waiting) - 1} more have not said that they have"
        if trouble is not None:
            message += _untouched(trouble)
        return Programming(is_true=False, reason="Loading", message=message, requeue_after_s=wait_s)


def _token(target: Files, config_map: Object | None) -> str:
    """With what Pods are touched for ``target``, which ``config_map`` has, where Pods are asked."""
    if config_map is None:
        return target.digest
    # What the Pod has read may be another content than this, or than the last one of the same digest.
    return f"{target.digest}.{config_map['metadata']['resourceVersion']}"


def _untouched(trouble: str) -> str:
    return f"; {trouble}; without that it takes up to 90 s"


def _refused(refusal: Refusal, namespace: str, wait_s: float | None) -> Programming:
    why = refusal.words or f"kubectl logs -n {namespace} {refusal.pod}"
    message = f"Envoy in Pod {refusal.pod} refuses {refusal.file}; what was loaded before goes on serving. Why: {why}"
    return Programming(
        is_true=False,
        reason="ConfigurationRefused",
        message=message,
        requeue_after_s=wait_s,
        needs_user_action=True,
    )


def _older(pods: Sequence[Pod], files: Files) -> Programming | None:
    """The answer while a Pod of another template serves, if one does."""
    older = [pod for pod in pods if pod.revision != files.revision]
    if not older:
        return None
    message = f"Pod {older[0].key.name} serves with what it was rolled out with"
    return Programming(is_true=False, reason="OlderPodServes", message=message)


def _about_secret(answer: Answer, name: str, secret: str) -> str:
    """What an Envoy can't use of a Secret, and what that means."""
    keys = "tls.crt and tls.key that fit" if name.startswith(CERTIFICATE_PREFIX) else "ca.crt"
    is_in_use = name not in answer.unusable((name,))
    left = "goes on with what was there before" if is_in_use else "serves nobody"
    return f"finds no {keys} in Secret {secret}, and what needs it {left}"


def _hash_of(config_map: Object) -> int:
    """What tells contents from others in this process; texts keep their hashes, so this is cheap."""
    return hash(frozenset(config_map["data"].items()))


def _own_texts(proxy: Object, config_map: Object | None) -> dict[str, str]:
    """The texts of a ConfigMap of ``proxy`` that no other writer has changed."""
    if config_map is None or controller_uid(config_map) != proxy["metadata"]["uid"]:
        return {}
    owned = fields_of(config_map).get("f:data", {})
    return {name: text for name, text in (config_map.get("data") or {}).items() if f"f:{name}" in owned}
