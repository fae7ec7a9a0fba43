"""What is checked or read before the operator starts: namespaces, the cluster's identity, and costly settings."""

from collections.abc import Callable, Iterable
from typing import Final

import anyio
import structlog

from operator_app.api.kinds import NAMESPACE, Key, Kind
from operator_app.errors import ConfigurationError, OperatorError, TransientError
from operator_app.kube.client import Cluster
from operator_app.kube.watch import QUIET_S
from operator_app.settings import Settings

log = structlog.get_logger(__name__)

CLUSTER_NAMESPACE: Final = "kube-system"
"""The namespace whose UID is the identity of a cluster: every cluster has it, and nobody can delete it."""

RETRY_BASE_S: Final = 0.5
RETRY_CAP_S: Final = 10.0


def warn_of_settings(settings: Settings) -> None:
    """Log a warning for each setting that works, but costs more than it seems to."""
    if settings.watch_idle_timeout_s < QUIET_S:
        sentence = (
            f"a healthy watch may be silent for {QUIET_S:g} s; with --watch-idle-timeout-s "
            f"({settings.watch_idle_timeout_s:g}) below that, quiet kinds are listed again and again"
        )
        log.warning("watch_idle_timeout_short", note=sentence)


async def refuse_unknown_namespaces(cluster: Cluster, settings: Settings) -> None:
    """Check that the operator's own namespace and at least one of the served namespaces exist.

    Raises ``ConfigurationError`` where one of the two is certainly not so. A namespace that can't be read counts as
    existing, and a served one that does not exist is logged: it must not keep the others unserved after a restart.
    """
    missing: set[str] = set()

    async def check(name: str) -> None:
        try:
            if await cluster.get(NAMESPACE, Key("", name)) is None:
                missing.add(name)
        except OperatorError as error:
            log.warning("namespace_unchecked", namespace=name, error=str(error))

    # All at the same time: the time-outs of many names, one after the other, would look like a stuck event loop.
    async with anyio.create_task_group() as checks:
        for name in {settings.namespace, *settings.namespaces}:
            checks.start_soon(check, name)
    if settings.namespace in missing:
        raise ConfigurationError(f"there is no namespace {settings.namespace!r}; create it, or name another")
    if settings.namespaces and missing.issuperset(settings.namespaces):
        names = " and no namespace ".join(map(repr, settings.namespaces))
        raise ConfigurationError(f"there is no namespace {names}; create it, or name another")
    for name in sorted(missing):
        log.warning("namespace_missing", namespace=name)


async def read_cluster_uid(cluster: Cluster) -> str:
    """The UID of the namespace ``kube-system``, which identifies the cluster in records outside of it.

    Raises the API server's errors, and ``ConfigurationError`` where the namespace can't be read for good.
    """
    try:
        found = await cluster.get(NAMESPACE, Key("", CLUSTER_NAMESPACE))
    except TransientError:
        raise
    except OperatorError as error:
        message = (
            f"the UID of the namespace {CLUSTER_NAMESPACE} marks the records outside as this cluster's, and can't be "
            f"read ({error.message}); apply the shipped RBAC, which allows to get this one namespace"
        )
        raise ConfigurationError(message) from error
    if found is None:
        raise ConfigurationError(f"there is no namespace {CLUSTER_NAMESPACE}, whose UID is the cluster's identity")
    uid: str = found["metadata"]["uid"]
    return uid


async def wait_for_cluster_uid(cluster: Cluster, *, beat: Callable[[], None]) -> str:
    """The same, but waits for an API server that does not answer; ``beat`` is called at least every 10 s meanwhile."""
    delay_s = RETRY_BASE_S
    while True:
        beat()
        try:
            return await read_cluster_uid(cluster)
        except TransientError as error:
            log.warning("cluster_uid_unread", retry_s=delay_s, error=str(error))
        await anyio.sleep(delay_s)
        delay_s = min(RETRY_CAP_S, delay_s * 2)


async def wait_for_filtered_lists(cluster: Cluster, kinds: Iterable[Kind]) -> bool:
    """Whether the API server filters lists by ranges of its hash of namespaces.

    Waits until each of ``kinds`` can be listed: a replica that can't list what it would serve must not hold shards.
    """
    found = []
    for kind in kinds:
        delay_s = RETRY_BASE_S
        while True:
            try:
                found.append(await cluster.filters_by_hash(kind))
                break
            except OperatorError as error:
                log.warning("kind_unlisted", kind=kind.kind, retry_s=delay_s, error=str(error))
            await anyio.sleep(delay_s)
            delay_s = min(RETRY_CAP_S, delay_s * 2)
    if not any(found):
        note = "the API server does not filter by hash (gate ShardedListAndWatch), so all namespaces are watched"
        log.warning("server_side_sharding_unavailable", note=note)
    return any(found)
