"""The finalizer: our one entry, put on and taken off without touching anybody else's or resurrecting anything."""

from pathlib import Path
from typing import Any

import pytest

from operator_app.api.kinds import ENVOY_PROXY, FINALIZER, Key, Object
from operator_app.errors import ConflictError
from operator_app.finalizer import has_finalizer
from operator_app.results import Outcome
from tests.unit.scripted_api import (
    CONFLICT,
    NOT_FOUND,
    ScriptedApi,
    components,
    ok,
    proxy_of_team,
    refused,
    with_finalizer,
)
from tests.unit.ssa.field_sets import entry

pytestmark = pytest.mark.anyio

KEY = Key("team-a", "checkout")
IDENTITY = {"name": "checkout", "namespace": "team-a", "uid": "proxy-uid"}
OTHERS = "example.com/other"


def proxy_with(*finalizers: str, owned: bool = True, **metadata: Any) -> Object:
    """A proxy with these finalizers, in which our entry is our own apply's, or another's."""
    proxy = proxy_of_team(finalizers=list(finalizers), **metadata)
    fields: Object = {"f:metadata": {"f:finalizers": {f'v:"{FINALIZER}"': {}}}}
    proxy["metadata"]["managedFields"] = [entry(proxy, fields) if owned else entry(proxy, fields, manager="exporter")]
    return proxy


async def test_holding_applies_our_entry_alone(tmp_path: Path) -> None:
    """One apply with the UID that was seen, and nothing in it but the entry; others' entries stay."""
    proxy = proxy_of_team(finalizers=[OTHERS])
    api = ScriptedApi(("apply EnvoyProxy", with_finalizer(proxy)))
    async with components(api, tmp_path, (ENVOY_PROXY, proxy)) as own:
        result = await own.finalizer.add(proxy)
        assert own.store.get(ENVOY_PROXY, KEY) == result
    assert api.sent[0].body == {
        "apiVersion": proxy["apiVersion"],
        "kind": "EnvoyProxy",
        "metadata": IDENTITY | {"finalizers": [FINALIZER]},
    }
    assert result["metadata"]["finalizers"] == [OTHERS, FINALIZER]
    assert has_finalizer(result)
    assert not has_finalizer(proxy)
    assert own.writes == [("EnvoyProxy", Outcome.CONFIGURED)]


async def test_what_is_held_costs_no_request(tmp_path: Path) -> None:
    """Whoever put the entry there, it stands."""
    for proxy in (proxy_with(FINALIZER), proxy_with(OTHERS, FINALIZER, owned=False)):
        async with components(ScriptedApi(), tmp_path) as own:
            assert await own.finalizer.add(proxy) is proxy


@pytest.mark.parametrize(
    "refusal",
    [
        CONFLICT,
        refused(422, "Invalid", "metadata.uid"),
        refused(422, "Invalid", "metadata.finalizers", message="no new finalizers can be added"),
    ],
    ids=["gone", "another life", "being deleted"],
)
async def test_holding_what_has_changed_means_to_decide_anew(tmp_path: Path, refusal: Any) -> None:  # noqa: ANN401
    """A proxy that has gone, was reborn or is on its way out is a conflict, never an invalid declaration."""
    async with components(ScriptedApi(("apply EnvoyProxy", refusal)), tmp_path) as own:
        with pytest.raises(ConflictError):
            await own.finalizer.add(proxy_of_team())
    assert own.writes == []


async def test_releasing_gives_up_our_share_alone(tmp_path: Path) -> None:
    """An apply of nothing but the identity releases our entry and leaves the others."""
    proxy = proxy_with(OTHERS, FINALIZER)
    api = ScriptedApi(("apply EnvoyProxy", with_finalizer(proxy)))
    async with components(api, tmp_path) as own:
        await own.finalizer.remove(proxy)
    assert api.sent[0].body["metadata"] == IDENTITY
    assert own.writes == [("EnvoyProxy", Outcome.CONFIGURED)]


async def test_what_is_not_held_costs_no_request(tmp_path: Path) -> None:
    """A second release, after a lost answer, has nothing to do."""
    async with components(ScriptedApi(), tmp_path) as own:
        await own.finalizer.remove(proxy_of_team(finalizers=[OTHERS]))


async def test_an_entry_that_another_owns_is_struck_out_of_the_version_that_was_read(tmp_path: Path) -> None:
    """The list is written whole, so the patch is pinned by UID and resourceVersion and keeps what others have there."""
    proxy = proxy_with(OTHERS, FINALIZER, owned=False)
    api = ScriptedApi(("patch EnvoyProxy", ok(proxy_of_team(finalizers=[OTHERS], resourceVersion="11"))))
    async with components(api, tmp_path) as own:
        await own.finalizer.remove(proxy)
    assert api.sent[0].body == {
        "metadata": {"uid": "proxy-uid", "resourceVersion": "10", "finalizers": [OTHERS]},
    }


async def test_a_shared_entry_is_given_up_and_then_struck_out(tmp_path: Path) -> None:
    """Where the entry stands after our share has gone, the second write uses the version of the first one's answer."""
    proxy = proxy_with(FINALIZER)
    shared = proxy_with(FINALIZER, owned=False, resourceVersion="12")
    api = ScriptedApi(("apply EnvoyProxy", ok(shared)), ("patch EnvoyProxy", ok(proxy_of_team(resourceVersion="13"))))
    async with components(api, tmp_path) as own:
        await own.finalizer.remove(proxy)
    assert api.sent[1].body["metadata"] == {"uid": "proxy-uid", "resourceVersion": "12", "finalizers": None}


@pytest.mark.parametrize(("line", "owned"), [("apply EnvoyProxy", True), ("patch EnvoyProxy", False)])
async def test_releasing_what_has_gone_is_done(tmp_path: Path, line: str, *, owned: bool) -> None:
    """404 is what was wanted."""
    async with components(ScriptedApi((line, NOT_FOUND)), tmp_path) as own:
        await own.finalizer.remove(proxy_with(FINALIZER, owned=owned))


@pytest.mark.parametrize(("line", "owned"), [("apply EnvoyProxy", True), ("patch EnvoyProxy", False)])
async def test_releasing_what_has_changed_means_to_decide_anew(tmp_path: Path, line: str, *, owned: bool) -> None:
    """A conflict is never swallowed: the entry may still stand on another version."""
    async with components(ScriptedApi((line, CONFLICT)), tmp_path) as own:
        with pytest.raises(ConflictError):
            await own.finalizer.remove(proxy_with(FINALIZER, owned=owned))
