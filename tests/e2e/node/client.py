"""The stand-in node's way to the API server: plain requests, and a mirror of one list kept current by a watch.

The operator has its own doorway; tests must not share its defects, so nothing is imported from it but names.
"""

import logging
from collections.abc import Callable, Mapping
from contextlib import aclosing
from pathlib import Path
from typing import Any, Final

import anyio
import httpx2
import msgspec
from anyio.abc import TaskStatus
from lightkube import KubeConfig
from lightkube.config.client_adapter import AsyncClient, ConnectionParams

from operator_app.api.kinds import Key, Object, key_of

log = logging.getLogger(__name__)

RELIST_DELAY_S: Final = 0.5
WATCH_S: Final = 240

STRATEGIC_MERGE: Final = "application/strategic-merge-patch+json"
MERGE: Final = "application/merge-patch+json"


def open_client(kubeconfig: Path) -> httpx2.AsyncClient:
    """An HTTP client for the current context of ``kubeconfig``, with its CA and its credentials; HTTP/1.1 only."""
    config = KubeConfig.from_file(kubeconfig).get()
    if config is None:
        raise ValueError(f"{kubeconfig} has no current context")
    return AsyncClient(config, ConnectionParams(timeout=httpx2.Timeout(10), trust_env=False))


async def request(
    http: httpx2.AsyncClient, method: str, path: str, body: Object | None = None, content_type: str = "application/json"
) -> Object:
    """One request; the decoded answer. Raises ``httpx2.HTTPStatusError`` for 4xx and 5xx, never retries."""
    content = None if body is None else msgspec.json.encode(body)
    response = await http.request(method, path, content=content, headers={"Content-Type": content_type})
    response.raise_for_status()
    answer: Object = msgspec.json.decode(response.content)
    return answer


class Mirror:
    """The objects of one list URL; ``on_change(obj, deleted)`` is called for every difference, after the fact.

    A watch that ends for any reason other than its own time-out is followed by a fresh list, which also finds
    the deletions that happened in between.
    """

    def __init__(
        self,
        http: httpx2.AsyncClient,
        path: str,
        on_change: Callable[[Object, bool], None],
        params: Mapping[str, str] | None = None,
    ) -> None:
        self.objects: dict[Key, Object] = {}
        self._http = http
        self._path = path
        self._on_change = on_change
        self._params = dict(params or {})

    async def run(self, *, task_status: TaskStatus[None] = anyio.TASK_STATUS_IGNORED) -> None:
        """Keep the mirror current until cancelled; started once the first list is in.

        Raises ``httpx2.HTTPError`` if the first list fails; later failures are retried for ever.
        """
        started = False
        while True:
            try:
                version = await self._list()
                if not started:
                    started = True
                    task_status.started()
                while True:
                    version = await self._watch(version)
            except (httpx2.HTTPError, msgspec.DecodeError) as error:
                if not started:
                    raise
                log.info("watch of %s: %r; listing again", self._path, error)
                await anyio.sleep(RELIST_DELAY_S)

    async def _list(self) -> str:
        response = await self._http.get(self._path, params=self._params)
        response.raise_for_status()
        answer: Object = msgspec.json.decode(response.content)
        listed = {key_of(obj): obj for obj in answer["items"]}
        gone = [self.objects.pop(key) for key in self.objects.keys() - listed.keys()]
        for obj in gone:
            self._on_change(obj, True)  # noqa: FBT003 - positional by the callback's type
        for obj in listed.values():
            self._take(obj)
        return str(answer["metadata"]["resourceVersion"])

    async def _watch(self, version: str) -> str:
        params = {**self._params, "watch": "1", "resourceVersion": version, "timeoutSeconds": str(WATCH_S)}
        timeout = httpx2.Timeout(10, read=WATCH_S + 10)
        async with self._http.stream("GET", self._path, params=params, timeout=timeout) as response:
            response.raise_for_status()
            buffer = b""
            async with aclosing(response.aiter_bytes()) as chunks:
                async for chunk in chunks:
                    *lines, buffer = (buffer + chunk).split(b"\n")
                    for line in lines:
                        event: dict[str, Any] = msgspec.json.decode(line)
                        obj: Object = event["object"]
                        if event["type"] == "ERROR":
                            raise httpx2.RemoteProtocolError(str(obj.get("message")))
                        version = obj["metadata"]["resourceVersion"]
                        if event["type"] == "DELETED":
                            self.objects.pop(key_of(obj), None)
                            self._on_change(obj, True)  # noqa: FBT003 - positional by the callback's type
                        else:
                            self._take(obj)
        return version

    def _take(self, obj: Object) -> None:
        old = self.objects.get(key_of(obj))
        self.objects[key_of(obj)] = obj
        if old is None or old["metadata"]["resourceVersion"] != obj["metadata"]["resourceVersion"]:
            self._on_change(obj, False)  # noqa: FBT003 - positional by the callback's type
