"""The watches of the shards that this replica holds, where the API server filters by ranges of namespaces.

Each shard has a watch of each kind of its own, from the moment it is acquired until it is given up; then everything of
it is forgotten. So a replica gets the objects of its own shards and no others, and an acquired shard is reconciled once
it is listed.
"""

from collections.abc import Callable, Coroutine, Sequence
from typing import Any, NoReturn

import anyio
from anyio.abc import TaskGroup

from operator_app.api.kinds import Kind
from operator_app.controller.scopes import Scope, Scopes
from operator_app.controller.sight import Watch
from operator_app.kube.deltas import Delta
from operator_app.kube.hash_ranges import HashRange

Sink = Callable[[Delta], None]

Follow = Callable[[Kind, Scope, Sink], Coroutine[Any, Any, NoReturn]]
"""Watches a scope until cancelled, and passes what it delivers to a sink."""


class ShardWatches:
    """Begins and ends them. ``forget`` is called for each watch that has ended."""

    def __init__(self, scopes: Scopes, *, follow: Follow, forget: Callable[[Watch], None]) -> None:
        self._scopes = scopes
        self._follow = follow
        self._forget = forget
        self._running: dict[int, tuple[HashRange, anyio.CancelScope]] = {}

    def begin(self, shard: int, hashes: HashRange, sink: Sink, tasks: TaskGroup) -> None:
        """Watch a shard in ``tasks`` until ``end``; nothing reaches ``sink`` afterwards."""
        self.end(shard)
        if not hashes.is_empty:
            self._running[shard] = (hashes, watching := anyio.CancelScope())
            tasks.start_soon(self._run, self._scopes.open(hashes), watching, sink)

    async def _run(self, scopes: Sequence[tuple[Kind, Scope]], watching: anyio.CancelScope, sink: Sink) -> None:
        def deliver(delta: Delta) -> None:
            if not watching.cancel_called:  # a task that was about to run delivers once more
                sink(delta)

        with watching:
            async with anyio.create_task_group() as watches:
                for kind, scope in scopes:
                    watches.start_soon(self._follow, kind, scope, deliver)

    def end(self, shard: int) -> None:
        """End the watches of a shard, if there are any, and forget what they have delivered."""
        hashes, watching = self._running.pop(shard, (None, None))
        if hashes is None or watching is None:
            return
        watching.cancel()
        self._scopes.close(hashes)
        for kind in self._scopes.kinds:
            self._forget((kind, hashes))
