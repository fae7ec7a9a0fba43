"""Outside registries as plugins: found by entry point, opened when the operator starts, closed when it ends.

A company adds its own registry without a fork, by a package with an entry point in the group
``operator_app.registries``::

    [project.entry-points."operator_app.registries"]
    our-dns = "our_package.dns:open_registry"

The entry point's name is the registry's name, a DNS label. What it names is called once with the operator's
``Settings`` and :class:`operator_app.registration.identity.Installation`, which every record must carry, without
``await``. It returns an async context manager that yields a
:class:`operator_app.registration.registry.Registry`; its clients and credentials live as long as the context. It may
raise ``ConfigurationError`` with a message of one sentence, on the call or on entering. It need not reach its system at
start: later failures are a ``TransientError`` each. Other settings of its own (an address, a credential's file) it
reads itself.

The registry ``in-cluster`` is the ledger itself, so it is not among them.
"""

from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from importlib.metadata import EntryPoint, entry_points
from typing import Any, Final

import anyio.to_thread

from operator_app.errors import ConfigurationError
from operator_app.registration.identity import Installation
from operator_app.registration.ledger import IN_CLUSTER
from operator_app.registration.registrar import Registries
from operator_app.registration.registry import Registry
from operator_app.settings import Settings

GROUP: Final = "operator_app.registries"

SHIPPED: Final = (
    EntryPoint("powerdns", "operator_app.registration.powerdns.registry:connect", GROUP),
    EntryPoint("rfc2136", "operator_app.registration.rfc2136.registry:connect", GROUP),
)
"""Registries of this package: also found when running from a checkout, where no entry point is installed."""

Factory = Callable[[Settings, Installation], AbstractAsyncContextManager[Registry]]


@asynccontextmanager
async def open_registries(
    settings: Settings, read_cluster_uid: Callable[[], Awaitable[str]]
) -> AsyncGenerator[Registries]:
    """The registries that ``settings`` name, open while the context lasts.

    ``read_cluster_uid`` returns the UID of the namespace ``kube-system``; it is called once if there is a registry
    outside the cluster, and not at all without. Raises what it raises, and ``ConfigurationError`` when a registry is
    not installed, can't be loaded or does not open, or when nobody chose an id for this installation.
    """
    names = sorted({settings.registry, *settings.registries} - {IN_CLUSTER})
    if not names:
        yield Registries({}, settings.registry)
        return
    factories = {name: await anyio.to_thread.run_sync(_load, name) for name in names}
    if settings.operator_id is None:
        message = (
            f"the registry {names[0]} is outside the cluster and needs an id of this installation, which nobody else "
            "who writes there has: choose one with OPERATOR_APP_OPERATOR_ID (--operator-id), such as prod-eu"
        )
        raise ConfigurationError(message)
    installation = Installation.of(await read_cluster_uid(), settings.operator_id)
    async with AsyncExitStack() as stack:
        outside: dict[str, Registry] = {}
        for name, factory in factories.items():
            try:
                outside[name] = await stack.enter_async_context(factory(settings, installation))
            except ConfigurationError:
                raise
            except Exception as error:
                # A plugin may raise anything; whoever starts the operator gets one sentence.
                message = f"the registry {name} does not open: {_message(error)}"
                raise ConfigurationError(message) from error
        yield Registries(outside, settings.registry, installation)


def _load(name: str) -> Factory:
    found = {(each.name, each.value): each for each in (*SHIPPED, *entry_points(group=GROUP))}
    of_that_name = [each for each in found.values() if each.name == name]
    if not of_that_name:
        known = ", ".join(sorted({IN_CLUSTER, *(each.name for each in found.values())}))
        raise ConfigurationError(f"no registry {name} is installed; there are: {known}")
    if len(of_that_name) > 1:
        duplicates = " and ".join(sorted(each.value for each in of_that_name))
        raise ConfigurationError(f"the registry {name} is installed twice, as {duplicates}; uninstall one")
    (entry_point,) = of_that_name
    try:
        factory: Any = entry_point.load()
    except Exception as error:
        message = f"the registry {name} can't be loaded from {entry_point.value}: {_message(error)}"
        raise ConfigurationError(message) from error
    if not callable(factory):
        raise ConfigurationError(f"the registry {name} is no factory: {entry_point.value} can't be called")
    return factory  # type: ignore[no-any-return]


def _message(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__
