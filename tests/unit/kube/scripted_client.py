"""A client whose every request goes to a transport of the test, and none anywhere else."""

from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import httpx2
import yaml

from operator_app.kube.client import Cluster


def kubeconfig_in(
    folder: Path, cluster: dict[str, Any] | None = None, user: dict[str, Any] | None = None, **rest: Any
) -> Path:
    """A kubeconfig file with one context, by default of a server that is never reached.

    ``cluster`` and ``user`` are the stanzas of these names; ``rest`` replaces members of the whole.
    """
    path = folder / "kubeconfig"
    content = {
        "apiVersion": "v1",
        "kind": "Config",
        "current-context": "here",
        "contexts": [{"name": "here", "context": {"cluster": "there", "user": "me"}}],
        "clusters": [{"name": "there", "cluster": {"server": "http://api.invalid"} | (cluster or {})}],
        "users": [{"name": "me", "user": user or {}}],
    } | rest
    path.write_text(yaml.safe_dump(content))
    return path


def cluster_over(
    transport: httpx2.AsyncBaseTransport, folder: Path, **options: Any
) -> AbstractAsyncContextManager[Cluster]:
    """A client over ``transport``; ``options`` are those of ``Cluster.connect``."""
    return Cluster.connect(
        kubeconfig=kubeconfig_in(folder), user_agent="test", transport_wrapper=lambda _: transport, **options
    )
