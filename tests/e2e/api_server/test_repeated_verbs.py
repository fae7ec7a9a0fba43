"""What repeating each verb of the API does, held against a real API server: the source of the table in docs/ideas.md.

Three questions for each verb: what the same request does when it is sent again at once, what it does after somebody
else has changed the object, and what it does where there is no object. A repeat that leaves
``metadata.resourceVersion`` as it was has written nothing. What ``test_client_contract.py`` measures already is not
measured again.
"""

import time
from collections.abc import Callable
from typing import Final

import pytest

from operator_app.api.kinds import CONFIG_MAP, DEPLOYMENT, ENVOY_PROXY, Key, Kind, Object
from tests.e2e.kube import Kube, KubeError, NotThere, PatchType, path_of

POD_TEMPLATE: Final = Kind("", "v1", "PodTemplate", "podtemplates")
NAME: Final = "subject"
THEIRS: Final = {"data": {"key": "theirs", "free": "theirs"}}
"""What somebody else writes: a field of ours and one of their own."""


@pytest.fixture
def key(namespace: str) -> Key:
    """Where the object is."""
    return Key(namespace, NAME)


def config_map(key: Key, **metadata: object) -> Object:
    """A ConfigMap with one field that is ours."""
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"name": key.name, "namespace": key.namespace, **metadata},
        "data": {"key": "ours"},
    }


def deployment(key: Key) -> Object:
    """A Deployment that runs nothing, with one container."""
    labels = {"app": NAME}
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": {"name": key.name, "namespace": key.namespace},
        "spec": {
            "replicas": 0,
            "selector": {"matchLabels": labels},
            "template": {
                "metadata": {"labels": labels},
                "spec": {"containers": [{"name": "main", "image": "none.invalid/none:1"}]},
            },
        },
    }


def put(admin: Kube, kind: Kind, obj: Object) -> Object:
    """PUT one object, as the operator's client does."""
    key = Key(obj["metadata"]["namespace"], obj["metadata"]["name"])
    answer: Object = admin.request("PUT", path_of(kind, key), body=obj, params={"fieldManager": "test"}).json()
    return answer


def version(obj: Object) -> str:
    """The resourceVersion, which moves with every write that changes something."""
    found: str = obj["metadata"]["resourceVersion"]
    return found


def versions_over_a_second(write: Callable[[], Object]) -> set[str]:
    """The resourceVersions of a request that is repeated until the times in ``managedFields`` are a second on."""
    begin_mono = time.monotonic()
    found = {version(write())}
    while time.monotonic() < begin_mono + 1.2:
        found.add(version(write()))
    return found


def changed_by_somebody(admin: Kube, key: Key) -> Object:
    """Another writer takes our field and adds one of its own."""
    return admin.patch(CONFIG_MAP, key, THEIRS, field_manager="somebody")


# --- POST ----------------------------------------------------------------------------------------------------------


def test_a_repeated_post_is_refused(admin: Kube, key: Key) -> None:
    """The second POST of a name is 409 AlreadyExists and leaves the object as it is, whoever has changed it since."""
    live = admin.create(CONFIG_MAP, config_map(key))
    for _ in range(2):
        with pytest.raises(KubeError) as refused:
            admin.create(CONFIG_MAP, config_map(key))
        assert (refused.value.code, refused.value.reason) == (409, "AlreadyExists")
        assert admin.get(CONFIG_MAP, key) == live
        live = changed_by_somebody(admin, key)


def test_a_repeated_post_of_a_generated_name_makes_another_object(admin: Kube, key: Key) -> None:
    """With generateName nothing tells the repeat from a second wish: there are two objects."""
    obj = config_map(key, generateName=f"{NAME}-")
    del obj["metadata"]["name"]
    names = {admin.create(CONFIG_MAP, obj)["metadata"]["name"] for _ in range(2)}
    assert len(names) == 2


# --- PUT -----------------------------------------------------------------------------------------------------------


def test_a_repeated_put_with_its_version_is_refused(admin: Kube, key: Key) -> None:
    """PUT with the resourceVersion that was read is a compare-and-set: its repeat is 409, and nothing is written."""
    read = admin.create(CONFIG_MAP, config_map(key))
    wanted = {**read, "data": {"key": "new"}}
    written = put(admin, CONFIG_MAP, wanted)
    with pytest.raises(KubeError) as refused:
        put(admin, CONFIG_MAP, wanted)
    assert (refused.value.code, refused.value.reason) == (409, "Conflict")
    assert admin.get(CONFIG_MAP, key) == written


def test_a_repeated_put_without_a_version_writes_nothing(admin: Kube, key: Key) -> None:
    """PUT of the same contents again leaves the resourceVersion alone."""
    admin.create(CONFIG_MAP, config_map(key))
    assert len(versions_over_a_second(lambda: put(admin, CONFIG_MAP, config_map(key)))) == 1


def test_a_put_without_a_version_takes_away_what_others_added(admin: Kube, key: Key) -> None:
    """After somebody's change, the repeat replaces the whole object: our field is back, and theirs is gone."""
    admin.create(CONFIG_MAP, config_map(key))
    put(admin, CONFIG_MAP, config_map(key))
    changed_by_somebody(admin, key)
    assert put(admin, CONFIG_MAP, config_map(key))["data"] == {"key": "ours"}


def test_a_put_creates_nothing(admin: Kube, key: Key) -> None:
    """PUT of an absent ConfigMap is 404."""
    with pytest.raises(NotThere):
        put(admin, CONFIG_MAP, config_map(key))
    assert admin.find(CONFIG_MAP, key) is None


# --- the patches ---------------------------------------------------------------------------------------------------


def test_a_repeated_json_patch_adds_again(admin: Kube, key: Key) -> None:
    """An ``add`` to the end of a list says what to do and not what to be: its repeat adds a second item."""
    obj = deployment(key)
    obj["spec"]["template"]["spec"]["containers"][0]["args"] = ["--one"]
    admin.create(DEPLOYMENT, obj)
    adding = [{"op": "add", "path": "/spec/template/spec/containers/0/args/-", "value": "--two"}]
    admin.patch(DEPLOYMENT, key, adding, patch_type="json")
    live = admin.patch(DEPLOYMENT, key, adding, patch_type="json")
    assert live["spec"]["template"]["spec"]["containers"][0]["args"] == ["--one", "--two", "--two"]


def test_a_json_patch_with_a_test_is_refused_when_repeated(admin: Kube, key: Key) -> None:
    """A ``test`` of the value that is replaced makes a compare-and-set: its repeat is 422 and writes nothing."""
    admin.create(CONFIG_MAP, config_map(key))
    swapping = [
        {"op": "test", "path": "/data/key", "value": "ours"},
        {"op": "replace", "path": "/data/key", "value": "new"},
    ]
    written = admin.patch(CONFIG_MAP, key, swapping, patch_type="json")
    with pytest.raises(KubeError) as refused:
        admin.patch(CONFIG_MAP, key, swapping, patch_type="json")
    assert (refused.value.code, refused.value.reason) == (422, "Invalid")
    assert admin.get(CONFIG_MAP, key) == written


NAMING: Final[list[tuple[PatchType, Object | list[Object]]]] = [
    ("json", [{"op": "replace", "path": "/data/key", "value": "ours"}]),
    ("merge", {"data": {"key": "ours"}}),
    ("strategic-merge", {"data": {"key": "ours"}}),
]
"""The same wish in each of the three languages."""


@pytest.mark.parametrize(("patch_type", "patch"), NAMING, ids=[each for each, _ in NAMING])
def test_a_repeated_patch_writes_nothing(
    admin: Kube, key: Key, patch_type: PatchType, patch: Object | list[Object]
) -> None:
    """A patch that names values is a no-op when it is repeated: the resourceVersion stays."""
    admin.create(CONFIG_MAP, {**config_map(key), "data": {"key": "old"}})
    assert len(versions_over_a_second(lambda: admin.patch(CONFIG_MAP, key, patch, patch_type=patch_type))) == 1


@pytest.mark.parametrize(("patch_type", "patch"), NAMING, ids=[each for each, _ in NAMING])
def test_a_patch_overwrites_what_it_names_and_nothing_else(
    admin: Kube, key: Key, patch_type: PatchType, patch: Object | list[Object]
) -> None:
    """After somebody's change, the repeat takes our field back without a question and leaves theirs."""
    admin.create(CONFIG_MAP, config_map(key))
    changed_by_somebody(admin, key)
    live = admin.patch(CONFIG_MAP, key, patch, patch_type=patch_type)
    assert live["data"] == {"key": "ours", "free": "theirs"}


@pytest.mark.parametrize(("patch_type", "patch"), NAMING, ids=[each for each, _ in NAMING])
def test_a_patch_creates_nothing(admin: Kube, key: Key, patch_type: PatchType, patch: Object | list[Object]) -> None:
    """A patch of an absent object is 404."""
    with pytest.raises(NotThere):
        admin.patch(CONFIG_MAP, key, patch, patch_type=patch_type)
    assert admin.find(CONFIG_MAP, key) is None


@pytest.mark.parametrize("patch_type", ["merge", "strategic-merge"])
def test_a_patch_never_releases_what_it_stops_naming(admin: Kube, key: Key, patch_type: PatchType) -> None:
    """What an earlier patch set and a later one leaves out stays: giving a field up takes a null of its own."""
    admin.create(CONFIG_MAP, config_map(key))
    admin.patch(CONFIG_MAP, key, {"data": {"key": "ours", "second": "ours"}}, patch_type=patch_type)
    live = admin.patch(CONFIG_MAP, key, {"data": {"key": "ours"}}, patch_type=patch_type)
    assert live["data"] == {"key": "ours", "second": "ours"}
    removed = [admin.patch(CONFIG_MAP, key, {"data": {"second": None}}, patch_type=patch_type) for _ in range(2)]
    assert removed[0]["data"] == {"key": "ours"}
    assert version(removed[0]) == version(removed[1])


@pytest.mark.parametrize(("patch_type", "containers"), [("merge", ["second"]), ("strategic-merge", ["second", "main"])])
def test_a_merge_patch_replaces_a_list_and_a_strategic_one_merges_it(
    admin: Kube, key: Key, patch_type: PatchType, containers: list[str]
) -> None:
    """A list of containers is one value to the one and a map by name to the other; repeats of both write nothing."""
    template = deployment(key)["spec"]["template"]
    metadata = {"namespace": key.namespace, "name": key.name}
    # Unlike a Deployment it has no controller that writes between two patches.
    admin.create(POD_TEMPLATE, {"apiVersion": "v1", "kind": "PodTemplate", "metadata": metadata, "template": template})
    second = [{"name": "second", "image": "none.invalid/none:1"}]
    patch = {"template": {"spec": {"containers": second}}}
    lives = [admin.patch(POD_TEMPLATE, key, patch, patch_type=patch_type) for _ in range(2)]
    assert [each["name"] for each in lives[0]["template"]["spec"]["containers"]] == containers
    assert version(lives[0]) == version(lives[1])


def test_a_custom_resource_takes_no_strategic_patch(admin: Kube, key: Key, crds: object) -> None:  # noqa: ARG001  # served
    """Strategic merge needs the merge keys of a built-in type: on an EnvoyProxy it is 415."""
    with pytest.raises(KubeError) as refused:
        admin.patch(ENVOY_PROXY, key, {"spec": {"paused": True}}, patch_type="strategic-merge")
    assert refused.value.code == 415


# --- DELETE --------------------------------------------------------------------------------------------------------


def test_a_repeated_delete_finds_nothing(admin: Kube, key: Key) -> None:
    """The second DELETE of an object that went at once is 404."""
    live = admin.create(CONFIG_MAP, config_map(key))
    admin.delete(CONFIG_MAP, key, uid=live["metadata"]["uid"])
    with pytest.raises(NotThere):
        admin.delete(CONFIG_MAP, key, uid=live["metadata"]["uid"])


def test_a_repeated_delete_of_an_object_on_its_way_out_writes_nothing(admin: Kube, key: Key) -> None:
    """While a finalizer keeps the object, further deletes are accepted and leave it as the first one made it."""
    admin.create(CONFIG_MAP, config_map(key, finalizers=["example.org/kept"]))
    lives = []
    for _ in range(3):
        admin.delete(CONFIG_MAP, key)
        lives.append(admin.get(CONFIG_MAP, key))
    admin.patch(CONFIG_MAP, key, {"metadata": {"finalizers": None}})
    assert "deletionTimestamp" in lives[0]["metadata"]
    assert lives[1:] == lives[:1] * 2


def test_a_delete_by_name_takes_whatever_has_the_name(admin: Kube, key: Key) -> None:
    """Repeated after the object was made anew, DELETE removes the new one, and with the old UID it is 409."""
    old = admin.create(CONFIG_MAP, config_map(key))
    admin.delete(CONFIG_MAP, key)
    new = admin.create(CONFIG_MAP, config_map(key))
    with pytest.raises(KubeError) as refused:
        admin.delete(CONFIG_MAP, key, uid=old["metadata"]["uid"])
    assert (refused.value.code, refused.value.reason) == (409, "Conflict")
    assert admin.get(CONFIG_MAP, key) == new
    admin.delete(CONFIG_MAP, key)
    assert admin.find(CONFIG_MAP, key) is None
