"""One container's life: started, probed, started again when it ends, stopped on request.

What it is, is told in a :class:`ContainerRecord`; what the API server hears of it, is decided elsewhere. Back-off
before a restart begins at 0.5 s and doubles up to 10 s; the kubelet's 10 s to 300 s would make tests wait. It is
forgotten after a minute without an end.
"""

import logging
from collections.abc import Callable
from contextlib import aclosing
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

import anyio
import httpx2
from anyio.abc import Process

from operator_app.api.kinds import Object
from tests.e2e.node import container as containers
from tests.e2e.node.probes import http_get, is_healthy, verdicts
from tests.e2e.node.references import MissingError, Source, UnsupportedError, environment
from tests.e2e.node.status import ContainerRecord, timestamp
from tests.e2e.node.validate import configuration_error

log = logging.getLogger(__name__)

BACKOFF_S: Final = 0.5
MAX_BACKOFF_S: Final = 10.0
FORGOTTEN_AFTER_S: Final = 60
SOURCE_RETRY_S: Final = 0.5


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What the containers of one Pod share. ``place`` is None where Envoy only validates."""

    pod: Object
    http: httpx2.AsyncClient
    source: Source
    paths: dict[str, Path]
    place: containers.Place | None
    pod_ip: str
    host_ip: str
    directory: Path
    logs: Path


class Supervisor:
    """Runs one container; calls ``changed`` after each change of ``record``."""

    def __init__(
        self, container: Object, surroundings: Surroundings, record: ContainerRecord, changed: Callable[[], None]
    ) -> None:
        self._container = container
        self._around = surroundings
        self._record = record
        self._changed = changed
        self._process: Process | None = None
        self._stopping = False
        metadata = surroundings.pod["metadata"]
        self._log_file = surroundings.logs / f"{metadata['namespace']}_{metadata['name']}_{container['name']}.log"

    async def run(self) -> None:
        """Keep the container running until it has ended for good; if cancelled, its process is killed first."""
        if not containers.is_envoy(self._container["image"]):
            self._wait("ErrImagePull", f"the stand-in node runs Envoy only; {self._container['image']} is not one")
            return
        backoff_s = BACKOFF_S
        while not self._stopping:
            began = anyio.current_time()
            try:
                env = environment(
                    self._container, self._around.pod, self._around.source, self._around.pod_ip, self._around.host_ip
                )
                code, message = await (self._validate(env) if self._around.place is None else self._live(env))
            except MissingError as error:
                self._wait("CreateContainerConfigError", str(error))
                await anyio.sleep(SOURCE_RETRY_S)
                continue
            except UnsupportedError as error:
                self._wait("CreateContainerConfigError", str(error))
                return
            self._end(code, message)
            if not self._may_restart(code):
                self._record.finished = True
                self._changed()
                return
            if anyio.current_time() - began > FORGOTTEN_AFTER_S:
                backoff_s = BACKOFF_S
            self._record.last_state = self._record.state
            self._wait("CrashLoopBackOff", f"back-off {backoff_s} s restarting container: {message}")
            await anyio.sleep(backoff_s)
            backoff_s = min(backoff_s * 2, MAX_BACKOFF_S)
            self._record.restart_count += 1

    async def stop(self) -> None:
        """Run the preStop hook, ask the process to end, and wait for it; the caller sets the limit."""
        self._stopping = True
        process = self._process
        if process is None or process.returncode is not None:
            return
        hook = (self._container.get("lifecycle") or {}).get("preStop")
        if hook:
            try:
                await self._run_hook(hook, process)
            except (OSError, ValueError) as error:
                log.warning("%s: preStop hook failed: %r", self._log_file.stem, error)
        await _terminate(process)

    def _may_restart(self, code: int) -> bool:
        policy = self._around.pod["spec"].get("restartPolicy", "Always")
        return not self._stopping and (policy == "Always" or (policy == "OnFailure" and code != 0))

    async def _run_hook(self, hook: Object, process: Process) -> None:
        if action := hook.get("sleep"):
            await anyio.sleep(action["seconds"])
        elif action := hook.get("httpGet"):
            await http_get(self._around.http, action, self._container, self._around.pod_ip)
        elif (action := hook.get("exec")) and (code := await self._execute(process, action["command"])):
            log.warning("%s: preStop hook exited with %d", self._log_file.stem, code)

    async def _live(self, env: dict[str, str]) -> tuple[int, str]:
        assert self._around.place is not None
        process = await containers.start(
            self._container, self._around.pod, env, self._around.paths, self._around.place, self._log_file
        )
        self._process = process
        try:
            self._run(f"standin://{process.pid}")
            async with anyio.create_task_group() as probes:
                probes.start_soon(self._probe, process)
                code = await process.wait()
                probes.cancel_scope.cancel()
        finally:
            if process.returncode is None:
                process.kill()
                with anyio.CancelScope(shield=True):
                    await process.wait()
        # A shell would say 128 + n for signal n, and so does the kubelet.
        return (128 - code if code < 0 else code), _last_line(self._log_file)

    async def _validate(self, env: dict[str, str]) -> tuple[int, str]:
        copies = self._around.directory / "validate" / self._container["name"]
        error = await configuration_error(self._container, env, self._around.paths, copies)
        if error is not None:
            return 1, error
        self._run("standin://validated")
        self._record.started = self._record.ready = True
        self._changed()
        await anyio.sleep_forever()
        raise AssertionError("unreachable")

    async def _probe(self, process: Process) -> None:
        await self._startup(process)
        self._record.started = True
        self._record.ready = "readinessProbe" not in self._container
        self._changed()
        async with anyio.create_task_group() as probes:
            if probe := self._container.get("readinessProbe"):
                probes.start_soon(self._readiness, probe, process)
            if probe := self._container.get("livenessProbe"):
                probes.start_soon(self._liveness, probe, process)

    async def _startup(self, process: Process) -> None:
        if probe := self._container.get("startupProbe"):
            async with aclosing(verdicts(probe, lambda: self._check(probe, process))) as states:
                async for state in states:
                    if state:
                        return
                    await self._give_up(process, "startup")

    async def _readiness(self, probe: Object, process: Process) -> None:
        async with aclosing(verdicts(probe, lambda: self._check(probe, process))) as states:
            async for state in states:
                if state != self._record.ready:
                    self._record.ready = state
                    self._changed()

    async def _liveness(self, probe: Object, process: Process) -> None:
        async with aclosing(verdicts(probe, lambda: self._check(probe, process))) as states:
            async for state in states:
                if not state:
                    await self._give_up(process, "liveness")

    async def _give_up(self, process: Process, probe: str) -> None:
        if self._stopping:
            return
        log.info("%s: %s probe failed; restarting", self._log_file.stem, probe)
        with anyio.move_on_after(self._around.pod["spec"].get("terminationGracePeriodSeconds", 30)):
            await _terminate(process)
        process.kill()

    async def _check(self, probe: Object, process: Process) -> bool:
        return await is_healthy(
            self._around.http,
            probe,
            self._container,
            self._around.pod_ip,
            lambda command: self._execute(process, command),
        )

    async def _execute(self, process: Process, command: list[str]) -> int:
        return await containers.execute(process, self._container, self._around.pod, command, self._log_file)

    def _run(self, container_id: str) -> None:
        self._record.container_id = container_id
        self._record.state = {"running": {"startedAt": timestamp(datetime.now(UTC))}}
        self._changed()

    def _wait(self, reason: str, message: str) -> None:
        self._record.state = {"waiting": {"reason": reason, "message": message}}
        self._record.ready = self._record.started = False
        self._changed()

    def _end(self, code: int, message: str) -> None:
        running = self._record.state.get("running", {})
        self._record.ready = self._record.started = False
        self._record.state = {
            "terminated": {
                "exitCode": code,
                "reason": "Error" if code else "Completed",
                "message": message,
                "containerID": self._record.container_id,
                "startedAt": running.get("startedAt"),
                "finishedAt": timestamp(datetime.now(UTC)),
            }
        }
        self._changed()


async def _terminate(process: Process) -> None:
    if process.returncode is None:
        process.terminate()
        await process.wait()


def _last_line(log_file: Path) -> str:
    lines = log_file.read_text(errors="replace").splitlines() if log_file.exists() else []
    return lines[-1][-500:] if lines else ""
