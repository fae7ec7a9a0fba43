"""What is checked before the operator starts: that its namespaces exist, and settings that cost more than they seem."""

import anyio
import structlog

from operator_app.api.kinds import NAMESPACE, Key
from operator_app.errors import ConfigurationError, OperatorError
from operator_app.kube.client import Cluster
from operator_app.kube.watch import QUIET_S
from operator_app.settings import Settings

log = structlog.get_logger(__name__)


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
