"""Every property of the API: each value converges, is idempotent and valid, and changing it back restores all.

Each proxy has a Pod that serves, so each change is also brought into it, and nothing else touches it.
"""

import json
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final

import pytest

from operator_app.api.crd import crds
from operator_app.api.kinds import (
    ANNOTATION_CONFIGURATION,
    ANNOTATION_REVISION,
    CONFIG_MAP,
    DEPLOYMENT,
    ENVOY_PROXY,
    SERVICE,
    Key,
    Object,
)
from operator_app.api.models import parse_spec
from operator_app.desired import child_key
from operator_app.envoy.files import rendered
from operator_app.envoy.messages import CONFIG_DIRECTORY
from tests import api_cases
from tests.e2e.kube import Kube, wait_until
from tests.e2e.loading_pod import LoadingPod
from tests.e2e.node.envoy import configuration_error
from tests.e2e.operator_process import OperatorProcess
from tests.e2e.proxies import (
    CONVERGE_TIMEOUT_S,
    DeclaredCheck,
    ProxyObjects,
    content_of,
    declared_children,
    give_addresses,
    holds,
    objects_of,
)
from tests.property_walk import UNREACHABLE, Property, Step, properties, trail, unexercised
from tests.unit.envoy.parts import joined

SCHEMA: Final[Object] = crds()[0]["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]["spec"]
BASE: Final[Object] = api_cases.proxy()["spec"] | {"replicas": 0}
"""Uses nearly every field. Without Pods, so that a hundred rollouts cost nothing; ``replicas`` has its own trail."""

TRAILS: Final[dict[str, tuple[Step, ...]]] = {str(prop): trail(prop, BASE) for prop in properties(SCHEMA)}
WALKERS: Final = 6
"""Proxies that are edited at the same time; the API server is what limits."""


def test_the_walk_leaves_out_nothing_of_the_schema() -> None:
    """Each property is set, changed, absent where it may be, at its bounds, and at each of its choices."""
    specs = [BASE, *(step.spec for steps in TRAILS.values() for step in steps)]
    assert set(unexercised(SCHEMA, specs)) == UNREACHABLE


def test_a_property_that_the_walk_does_not_know_is_noticed() -> None:
    """A field that is new to the schema fails the walk, whether or not its values can be guessed."""
    specs = [BASE, *(step.spec for steps in TRAILS.values() for step in steps)]
    fresh = {"type": "integer", "minimum": 1, "maximum": 9}
    grown = SCHEMA | {"properties": SCHEMA["properties"] | {"fresh": fresh}}
    assert "fresh: not two values" in unexercised(grown, specs)
    with pytest.raises(LookupError):
        trail(Property(("fresh",), {"type": "string"}, is_required=False), BASE)


@pytest.mark.timeout(1800)
def test_every_property_converges_and_can_be_changed_back(
    admin: Kube, namespace: str, operator: OperatorProcess, tmp_path: Path
) -> None:
    """After each step the children are as declared, a second apply is a no-op, Envoy accepts; the end is the start.

    The Pod has loaded each change, after a touch, and one that changes no file has not touched it.
    """
    operator.start("--ask-pods=true")
    walkers = [_Walker(admin, namespace, f"p{number}") for number in range(WALKERS)]
    with ThreadPoolExecutor(WALKERS) as threads:
        walks = [threads.submit(walker.walk, names) for walker, names in zip(walkers, _shares(), strict=True)]
    for walk in walks:
        walk.result()
    assert {trail: error for walker in walkers for trail, error in walker.failed.items()} == {}
    assert operator.metric("operator_app_drift_repaired_total") == 0, "an edit of the spec is no drift"

    configs = {config: what for walker in walkers for config, what in walker.configs.items()}
    with ThreadPoolExecutor(2) as validators:
        refused = dict(zip(configs.values(), validators.map(_refusal, configs, [tmp_path] * len(configs)), strict=True))
    assert {what: error for what, error in refused.items() if error} == {}


def _shares() -> list[list[str]]:
    """The names of the trails, one list for each walker, about as many steps in each."""
    shares: list[list[str]] = [[] for _ in range(WALKERS)]
    steps = [0] * WALKERS
    for name in sorted(TRAILS, key=lambda each: -len(TRAILS[each])):
        least = steps.index(min(steps))
        shares[least].append(name)
        steps[least] += len(TRAILS[name])
    return shares


class _Walker:
    """Walks trails one after the other, with one proxy as long as none of them fails.

    ``failed`` has the error of each trail that failed, ``configs`` each configuration with the first step that made it.
    """

    def __init__(self, admin: Kube, namespace: str, name: str) -> None:
        self.failed: dict[str, str] = {}
        self.configs: dict[str, str] = {}
        self._admin = admin
        self._namespace = namespace
        self._name = name
        self._check = DeclaredCheck(admin)
        self._pod = LoadingPod(admin)

    def walk(self, names: list[str]) -> None:
        """Walk the trails of these names. A trail that fails ends there, and the next one begins with a new proxy."""
        with self._pod:
            self._walk_all(names)

    def _walk_all(self, names: list[str]) -> None:
        key, first = self._begin()
        for name in names:
            try:
                self._walk(key, first, TRAILS[name])
            except Exception as error:  # noqa: BLE001  # whatever it is, the other trails have theirs to tell
                self.failed[name] = f"{error!r:.2000}"
                self._admin.delete(ENVOY_PROXY, key)
                key, first = self._begin()
        self._admin.delete(ENVOY_PROXY, key)

    def _begin(self) -> tuple[Key, ProxyObjects]:
        """A new proxy of the base, and its objects."""
        key = Key(self._namespace, f"{self._name}-{len(self.failed)}")
        proxy = api_cases.proxy(key.name, key.namespace)
        self._admin.create(ENVOY_PROXY, proxy | {"spec": _with_own_hostname(BASE, key)})
        first = self._settled(key, "base")
        self.configs.setdefault(_configuration(first), "base")
        return key, first

    def _walk(self, key: Key, first: ProxyObjects, steps: tuple[Step, ...]) -> None:
        now = first
        for step in steps:
            before, pod = now, self._pod.live()
            spec = _with_own_hostname(step.spec, key)
            self._admin.patch(ENVOY_PROXY, key, [{"op": "replace", "path": "/spec", "value": spec}], patch_type="json")
            now = self._settled(key, step.what)
            self.configs.setdefault(_configuration(now), step.what)
            assert now.uids == first.uids, step.what
            _check_touch(before, pod, now, self._pod.live(), step.what)
        for kind, child in first.children.items():
            assert _chosen(now.children[kind]) == _chosen(child), f"changing back after {steps[0].what}: {kind}"
        for kind, child in first.optional.items():
            assert now.optional[kind]["spec"] == child["spec"], f"changing back after {steps[0].what}: {kind}"
        assert now.record["spec"] | {"generation": 0} == first.record["spec"] | {"generation": 0}

    def _settled(self, key: Key, what: str) -> ProxyObjects:
        """Everything of a proxy once it is reconciled, after checking it."""
        admin = self._admin
        proxy = admin.wait_until(ENVOY_PROXY, key, _is_reconciled, CONVERGE_TIMEOUT_S)
        self._pod.follow(proxy, admin.get(DEPLOYMENT, child_key(key)))
        wanted = rendered(parse_spec(proxy)).texts.items()
        wait_until(lambda: wanted <= self._pod.loaded.items(), CONVERGE_TIMEOUT_S, f"{what}: a Pod that has loaded it")
        service = admin.get(SERVICE, child_key(key))
        if service["spec"]["type"] == "LoadBalancer" and not service["status"]["loadBalancer"]:
            give_addresses(admin, key, "203.0.113.80")  # without one, nothing is registered
            admin.wait_until(ENVOY_PROXY, key, holds("Registered"), CONVERGE_TIMEOUT_S)
        found = objects_of(admin, key)
        declared_kinds = declared_children(found.proxy, found.children)
        live = found.children | found.optional
        assert {*live} == {*declared_kinds}, what
        for kind, declared in declared_kinds.items():
            assert self._check.differences(kind, declared, live[kind]) == (), f"{what}: {kind}"
        if holds("Registered")(found.proxy):
            metadata = found.proxy["metadata"]
            assert found.record["spec"]["generation"] == metadata["generation"], what
            assert found.record["spec"]["proxy"]["uid"] == metadata["uid"], what
        return found


def _check_touch(before: ProxyObjects, pod: Object, now: ProxyObjects, pod_now: Object, what: str) -> None:
    """A Pod that stays was made to load other files, and left alone where they are the same."""
    if pod_now["metadata"]["uid"] != pod["metadata"]["uid"]:
        return
    was, wanted = (rendered(parse_spec(each.proxy)).digest for each in (before, now))
    if was == wanted:
        assert pod_now["metadata"]["resourceVersion"] == pod["metadata"]["resourceVersion"], f"{what}: a needless touch"
    else:
        assert pod_now["metadata"]["annotations"][ANNOTATION_CONFIGURATION].startswith(wanted), f"{what}: no touch"


def _chosen(child: Object) -> Object:
    """What an object consists of, without the ports of nodes: the API server gives a port that comes back a new one."""
    content = content_of(child)
    if child["kind"] != SERVICE.kind:
        return content
    spec = {name: value for name, value in content["spec"].items() if name != "healthCheckNodePort"}
    ports = [{name: value for name, value in port.items() if name != "nodePort"} for port in spec["ports"]]
    return content | {"spec": spec | {"ports": ports}}


def _with_own_hostname(spec: Object, key: Key) -> Object:
    """``spec`` with a hostname in place of the base's, which only one of the proxies could have."""
    registration = spec.get("registration", {})
    if registration.get("hostname") != BASE["registration"]["hostname"]:
        return spec
    return spec | {"registration": registration | {"hostname": f"{key.name}.{key.namespace}.example.com"}}


def _is_reconciled(proxy: Object) -> bool:
    """Whether the children are as declared, and the conditions about the object's generation."""
    if not holds("Reconciled")(proxy):
        return False
    generation = proxy["metadata"]["generation"]
    conditions = {each["type"]: each for each in proxy["status"]["conditions"]}
    return all(conditions[each]["observedGeneration"] == generation for each in ("Reconciled", "Registered", "Ready"))


def _configuration(found: ProxyObjects) -> str:
    """The files of a proxy as one configuration, which Envoy can validate without running, and those about Secrets."""
    texts = _texts(found)
    return json.dumps([joined(texts), {name: text for name, text in texts.items() if name.startswith("sds-")}])


def _texts(found: ProxyObjects) -> dict[str, str]:
    """The files of the Pods' revision."""
    template = found.children[DEPLOYMENT]["spec"]["template"]["metadata"]
    revision = template["annotations"][ANNOTATION_REVISION]
    data: dict[str, str] = found.children[CONFIG_MAP]["data"]
    return {name: text for name, text in data.items() if not re.match("(envoy|lds)-", name) or revision in name}


def _refusal(config: str, directory: Path) -> str | None:
    """The error with which Envoy refuses a configuration whose Secrets are not there yet, or ``None``."""
    own = directory / f"{hash(config)}"
    own.mkdir()
    whole, secrets = json.loads(config.replace(CONFIG_DIRECTORY, f"{own}/envoy"))
    (own / "envoy" / "..data").mkdir(parents=True)
    for name, text in secrets.items():
        (own / "envoy" / "..data" / name).write_text(text)
        for resource in json.loads(text)["resources"]:
            (secret,) = (resource[each] for each in ("tls_certificate", "validation_context") if each in resource)
            Path(secret["watched_directory"]["path"]).mkdir(parents=True)
    file = own / "configuration.json"
    file.write_text(json.dumps(whole))
    return configuration_error(file)
