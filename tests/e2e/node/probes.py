"""Probes: the checks of a container that the kubelet runs from the host, and the counting that turns them into a state.

``httpGet`` (any status from 200 to 399 is a success) and ``tcpSocket`` are run for real; ``exec`` is run where the
container runs; ``grpc`` always fails. One thing is faster than in the kubelet, for the tests' sake: until a probe's
first success it is repeated every 0.1 s, and failures then count only once per ``periodSeconds``.
"""

import logging
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import Any, Final

import anyio
import httpx2

from operator_app.api.kinds import Object

log = logging.getLogger(__name__)

IMPATIENT_S: Final = 0.1

Execute = Callable[[list[str]], Awaitable[int]]
"""Runs a command in the container; its exit code."""


def port_number(port: int | str, container: Object) -> int:
    """A port given by number or by the name of one of the container's ports. Raises ValueError for an unknown name."""
    if isinstance(port, int):
        return port
    for declared in container.get("ports") or []:
        if declared.get("name") == port:
            return int(declared["containerPort"])
    raise ValueError(f"container {container['name']} declares no port named {port}")


async def http_get(http: httpx2.AsyncClient, action: Object, container: Object, ip: str) -> bool:
    """One ``httpGet`` action of a probe or hook, from the host; no redirect is followed, no certificate checked."""
    port = port_number(action["port"], container)
    scheme, path = action.get("scheme", "HTTP").lower(), action.get("path", "/").lstrip("/")
    url = f"{scheme}://{action.get('host') or ip}:{port}/{path}"
    headers = [(header["name"], header["value"]) for header in action.get("httpHeaders") or []]
    try:
        response = await http.get(url, headers=headers)
    except (httpx2.HTTPError, httpx2.InvalidURL):
        return False
    return 200 <= response.status_code < 400


async def is_healthy(http: httpx2.AsyncClient, probe: Object, container: Object, ip: str, execute: Execute) -> bool:
    """One run of the probe's action; False on any failure, or after ``timeoutSeconds``."""
    try:
        with anyio.move_on_after(probe.get("timeoutSeconds", 1)):
            if action := probe.get("httpGet"):
                return await http_get(http, action, container, ip)
            if action := probe.get("tcpSocket"):
                stream = await anyio.connect_tcp(action.get("host") or ip, port_number(action["port"], container))
                await stream.aclose()
                return True
            if action := probe.get("exec"):
                return await execute(action["command"]) == 0
            log.warning("container %s: no probe of this type here: %s", container["name"], ", ".join(probe))
    except OSError:
        # The port is closed, or the process that an exec probe belongs to has just ended.
        return False
    except ValueError as error:
        log.warning("container %s: %s", container["name"], error)
    return False


async def verdicts(probe: dict[str, Any], check: Callable[[], Awaitable[bool]]) -> AsyncGenerator[bool, None]:
    """The probe's state each time it is confirmed: True after ``successThreshold``, False after ``failureThreshold``.

    Endless. The first check comes after ``initialDelaySeconds``.
    """
    period_s = probe.get("periodSeconds", 10)
    thresholds = {True: probe.get("successThreshold", 1), False: probe.get("failureThreshold", 3)}
    await anyio.sleep(probe.get("initialDelaySeconds", 0))
    in_a_row, last, succeeded_once = 0, None, False
    failure_counts_at = anyio.current_time()
    while True:
        success = await check()
        succeeded_once = succeeded_once or success
        counts = success or succeeded_once or anyio.current_time() >= failure_counts_at
        if counts:
            failure_counts_at = anyio.current_time() + period_s
            in_a_row = in_a_row + 1 if success is last else 1
            last = success
            if in_a_row >= thresholds[success]:
                yield success
        await anyio.sleep(period_s if succeeded_once else min(period_s, IMPATIENT_S))
