"""What is checked before the start: namespaces that do not exist, settings that cost more than they seem to."""

from collections.abc import Collection
from pathlib import Path

import anyio
import httpx2
import pytest
import structlog

from operator_app.errors import ConfigurationError
from operator_app.preflight import refuse_unknown_namespaces, warn_of_settings
from operator_app.settings import Settings
from tests.unit.kube.scripted_client import cluster_over

pytestmark = pytest.mark.anyio

OWN = "edge-system"


async def checked(folder: Path, existing: Collection[str], served: tuple[str, ...], *, forbidden: str = "") -> None:
    """The check of the namespaces that are to be served, at a server that responds once all of them were requested."""
    asked: set[str] = set()
    everything = anyio.Event()

    async def answer(request: httpx2.Request) -> httpx2.Response:
        name = request.url.path.rpartition("/")[2]
        asked.add(name)
        if asked == {OWN, *served}:
            everything.set()
        await everything.wait()
        if name == forbidden:
            return httpx2.Response(403, json={"kind": "Status", "code": 403, "reason": "Forbidden", "message": "no"})
        if name in existing:
            metadata = {"name": name, "uid": "u", "resourceVersion": "1"}
            return httpx2.Response(200, json={"apiVersion": "v1", "kind": "Namespace", "metadata": metadata})
        status = {"kind": "Status", "code": 404, "reason": "NotFound", "message": "no", "details": {"name": name}}
        return httpx2.Response(404, json=status)

    async with cluster_over(httpx2.MockTransport(answer), folder, request_timeout_s=1) as cluster:
        await refuse_unknown_namespaces(cluster, Settings(namespace=OWN, namespaces=served))


async def test_a_missing_namespace_affects_no_other(tmp_path: Path) -> None:
    """It is logged, and the others are served; all are requested at the same time, so silence costs one time-out."""
    with structlog.testing.capture_logs() as logs:
        await checked(tmp_path, {OWN, "a"}, ("a", "gone", "hidden"), forbidden="hidden")
    assert {(each["event"], each["namespace"]) for each in logs} == {
        ("namespace_missing", "gone"),
        ("namespace_unchecked", "hidden"),
    }


async def test_where_nothing_can_be_served_the_operator_does_not_start(tmp_path: Path) -> None:
    """Without its own namespace, or without any of those to serve; one that can't be read may exist."""
    with pytest.raises(ConfigurationError, match="there is no namespace 'edge-system'; create it, or name another"):
        await checked(tmp_path, {"a"}, ("a",))
    with pytest.raises(ConfigurationError, match="there is no namespace 'x' and no namespace 'y'; create"):
        await checked(tmp_path, {OWN}, ("x", "y"))
    await checked(tmp_path, {OWN}, ("x", "y"), forbidden="y")
    await checked(tmp_path, {OWN}, ())


def test_an_idle_timeout_below_the_bookmark_interval_is_logged() -> None:
    """It is allowed, for tests; the warning says why every quiet kind is listed again and again."""
    with structlog.testing.capture_logs() as logs:
        warn_of_settings(Settings())
        assert logs == []
        warn_of_settings(Settings(watch_idle_timeout_s=20))
    assert [each["event"] for each in logs] == ["watch_idle_timeout_short"]
