"""The operator with a sampled profile of itself: ``python -m benchmarks.profiled_operator run ...``.

Every 4 ms of its CPU time the stack is looked at, unless a module is being imported. At its end the operator prints a
log line ``profile`` with the shares of its CPU time: by the layer of the innermost frame that belongs to one, each
sample once; and of chosen functions with everything that they call.
"""

import json
import signal
import sys
from collections import Counter
from types import FrameType
from typing import Final

from operator_app.__main__ import main

INTERVAL_S: Final = 0.004

LAYERS: Final = {
    "pool of connections": ("httpcore2/_async/connection_pool", "httpcore2/_async/connection.", "httpcore2/_utils"),
    "HTTP/1.1": ("h11/", "httpcore2/_async/http11"),
    "HTTP client above the pool": ("httpx2/", "lightkube/", "operator_app/kube/client", "operator_app/kube/transport"),
    "sockets and TLS": ("httpcore2/_backends", "anyio/streams", "/ssl.py", "asyncio/sslproto", "anyio/_core/_sockets"),
    "answers and objects as JSON": ("operator_app/kube/responses", "msgspec", "/json/"),
    "bodies as YAML": ("yaml",),
    "watches and store": ("operator_app/kube/store", "operator_app/kube/watch", "operator_app/controller/"),
    "comparing and applying": ("operator_app/ssa/", "operator_app/apply"),
    "declaring": ("operator_app/desired", "operator_app/envoy/", "operator_app/api/", "pydantic"),
    "registering": ("operator_app/registration/",),
    "status": ("operator_app/status",),
    "logs and metrics": ("operator_app/observability", "structlog", "prometheus_client"),
    "rest of the operator": ("operator_app/",),
    "event loop and tasks": ("asyncio/", "anyio/", "selectors.py", "contextlib.py"),
}  # fmt: skip
"""Layers by parts of the paths of their files, the first that fits."""

WHOLE: Final = {
    "asking idle connections": ("httpcore2/_async/http11", "has_expired"),
    "assigning connections": ("httpcore2/_async/connection_pool", "_assign_requests_to_connections"),
    "sending requests": ("operator_app/kube/client", "_send"),
    "building requests": ("lightkube/core/generic_client", "prepare_request"),
    "writing YAML": ("operator_app/kube/client", "_yaml"),
    "watching": ("operator_app/kube/watch", "follow"),
    "the whole of a reconcile": ("operator_app/reconcile", "reconcile"),
}
"""Functions by a part of their file's path and their names."""


class Profile:
    """Samples of this process's main thread."""

    def __init__(self) -> None:
        self._layers: Counter[str] = Counter()
        self._whole: Counter[str] = Counter()
        self._functions: Counter[str] = Counter()
        self._samples = 0

    def install(self) -> None:
        """Sample from now on."""
        signal.signal(signal.SIGPROF, self._sample)
        signal.setitimer(signal.ITIMER_PROF, INTERVAL_S, INTERVAL_S)

    def _sample(self, _signal: int, frame: FrameType | None) -> None:
        if _is_importing(frame):
            return
        self._samples += 1
        layer, seen = "", set[str]()
        if frame is not None:
            code = frame.f_code
            self._functions[f"{code.co_filename.rpartition('site-packages/')[2]} {code.co_qualname}"] += 1
        while frame is not None:
            file, name = frame.f_code.co_filename, frame.f_code.co_name
            layer = layer or next((each for each, parts in LAYERS.items() if any(part in file for part in parts)), "")
            seen |= {what for what, (part, function) in WHOLE.items() if name == function and part in file}
            frame = frame.f_back
        self._layers[layer or "something else"] += 1
        self._whole.update(seen)

    def text(self) -> str:
        """The shares, the largest first."""

        def lines(found: Counter[str], most: int | None = None) -> str:
            return "\n".join(
                f"  {count / max(1, self._samples):6.1%} {what}" for what, count in found.most_common(most)
            )

        return (
            f"{self._samples} samples, by layer:\n{lines(self._layers)}\n"
            f"functions with all that they call:\n{lines(self._whole)}\nfunctions alone:\n{lines(self._functions, 25)}"
        )


def _is_importing(frame: FrameType | None) -> bool:
    """Whether a module is being imported, which only a start does."""
    while frame is not None:
        if "importlib" in frame.f_code.co_filename:
            return True
        frame = frame.f_back
    return False


if __name__ == "__main__":
    profile = Profile()
    profile.install()
    code = main()
    signal.setitimer(signal.ITIMER_PROF, 0)
    print(json.dumps({"event": "profile", "text": profile.text()}), flush=True)
    sys.exit(code)
