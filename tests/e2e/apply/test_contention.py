"""Other writers of the same objects: their own fields stay theirs, and edits of ours are undone ever more slowly."""

import threading
import time
from collections.abc import Callable
from itertools import pairwise
from typing import Any, Final

import pytest

from operator_app.api.kinds import (
    CHILD_KINDS,
    CONFIG_MAP,
    DEPLOYMENT,
    ENVOY_PROXY,
    LABEL_MANAGED_BY,
    PROXY_REGISTRATION,
    SERVICE,
    Key,
    Kind,
    Object,
)
from operator_app.desired import child_key
from operator_app.envoy.files import CLUSTERS_FILE
from tests.e2e.controlplane import AuditEntry, AuditLog
from tests.e2e.controlplane.audit import Mark
from tests.e2e.kube import Kube, wait_until
from tests.e2e.operator_process import OperatorProcess
from tests.e2e.proxies import (
    CONTAINER,
    OPERATOR_USER,
    a_proxy,
    condition,
    drift_of,
    holds,
    is_refused,
    record_key,
    wait_reconciled,
)
from tests.e2e.rivals import RivalEdit, rival_writing

THRESHOLD: Final = 3
WINDOW_S: Final = 4.0
BASE_S: Final = 0.5
CAP_S: Final = 4.0
BREAKER: Final = (
    f"--contention-threshold={THRESHOLD}",
    f"--contention-window-s={WINDOW_S:g}",
    f"--contention-base-s={BASE_S:g}",
    f"--contention-cap-s={CAP_S:g}",
)
PATIENT: Final = (*BREAKER[:1], "--contention-window-s=30", "--contention-base-s=30", "--contention-cap-s=30")
"""Flags of an operator that, once it waits, waits for longer than a test takes."""

AT_ONCE_S: Final = 2.0
"""Enough for a round on a busy machine, and far below the pause of ``PATIENT``."""


def converged(admin: Kube, key: Key, **spec: Any) -> Object:
    """A proxy that is reconciled."""
    admin.create(ENVOY_PROXY, a_proxy(key.namespace, key.name, **spec))
    return wait_reconciled(admin, key)


def selector_edit(key: Key) -> RivalEdit:
    """A rival's edit of the Service's selector."""
    selector = {"app": "rival"}
    return RivalEdit(
        SERVICE,
        child_key(key),
        lambda live: bool(live["spec"]["selector"] == selector),
        [{"op": "replace", "path": "/spec/selector", "value": selector}],
    )


def label_edit(key: Key, kind: Kind, value: str | None = "rival") -> RivalEdit:
    """A rival's edit of the label that names the manager of the object; ``None`` removes it."""
    return RivalEdit(
        kind,
        child_key(key),
        lambda live: bool(live["metadata"]["labels"].get(LABEL_MANAGED_BY) == value),
        {"metadata": {"labels": {LABEL_MANAGED_BY: value}}},
    )


def data_edit(key: Key) -> RivalEdit:
    """A rival's edit of Envoy's configuration."""
    return RivalEdit(
        CONFIG_MAP,
        child_key(key),
        lambda live: bool(live["data"][CLUSTERS_FILE] == "{}"),
        {"data": {CLUSTERS_FILE: "{}"}},
    )


def writes_to(audit: AuditLog, kind: Kind, key: Key, since: Mark) -> list[AuditEntry]:
    """The operator's writes to one object."""
    wanted = (kind.plural, "", *key)
    return [
        each
        for each in audit.writes(OPERATOR_USER, since)
        if (each.resource, each.subresource, each.namespace, each.name) == wanted
    ]


def wait_contended(admin: Kube, key: Key) -> Object:
    """The proxy once its status says that a field is contended."""
    return admin.wait_until(ENVOY_PROXY, key, is_refused("Reconciled", "Contended"))


def assert_slowed_down(writes: list[AuditEntry]) -> None:
    """After the first repairs, each one waits twice as long as the one before, up to the cap."""
    gaps_s = [(after.received_at - before.received_at).total_seconds() for before, after in pairwise(writes)]
    for beyond, gap_s in enumerate(gaps_s[THRESHOLD - 1 :]):
        assert gap_s >= min(CAP_S, BASE_S * 2**beyond) - 0.1, gaps_s


def assert_at_once(act: Callable[[], object], probe: Callable[[], object], what: str) -> None:
    """The effect of ``act`` is there within ``AT_ONCE_S``."""
    act()
    begun_mono = time.monotonic()
    wait_until(probe, AT_ONCE_S, what)
    assert time.monotonic() - begun_mono < AT_ONCE_S


def test_writers_of_other_fields_keep_theirs(admin: Kube, key: Key, operator: OperatorProcess) -> None:
    """Four writers of labels, annotations, data and the spec at the same time: each keeps what it wrote last."""
    operator.start()
    converged(admin, key)
    count = 25
    done: dict[str, int] = {}

    def writing(name: str, write: Callable[[int], object]) -> threading.Thread:
        def run() -> None:
            for number in range(1, count + 1):
                write(number)
                done[name] = number

        return threading.Thread(target=run, name=name)

    child = child_key(key)

    def relabel(kind: Kind) -> Callable[[int], object]:
        return lambda n: admin.patch(kind, child, {"metadata": {"labels": {"n": str(n)}}})

    writers = [writing(f"label {kind}", relabel(kind)) for kind in CHILD_KINDS]
    writers += [
        writing("annotation", lambda n: admin.patch(SERVICE, child, {"metadata": {"annotations": {"n": str(n)}}})),
        writing("data", lambda n: admin.patch(CONFIG_MAP, child, {"data": {"theirs": str(n)}})),
        writing("spec", lambda n: admin.patch(ENVOY_PROXY, key, {"spec": {"replicas": n}})),
        writing("drift", lambda n: admin.patch(DEPLOYMENT, child, {"spec": {"progressDeadlineSeconds": 600 + n}})),
    ]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    assert set(done.values()) == {count}
    proxy = wait_reconciled(admin, key)

    assert drift_of(admin, key) == {}
    live = {kind: admin.get(kind, child) for kind in CHILD_KINDS}
    assert {each["metadata"]["labels"]["n"] for each in live.values()} == {str(count)}
    assert live[SERVICE]["metadata"]["annotations"]["n"] == str(count)
    assert live[CONFIG_MAP]["data"]["theirs"] == str(count)
    assert live[DEPLOYMENT]["spec"]["replicas"] == count
    assert live[DEPLOYMENT]["spec"]["progressDeadlineSeconds"] == 600 + count
    assert condition(proxy, "Contended") == {}


@pytest.mark.parametrize("how", ["replaced", "removed", "by turns"])
def test_repairs_against_a_rival_slow_down_and_its_end_is_noticed(
    admin: Kube, audit: AuditLog, key: Key, operator: OperatorProcess, how: str
) -> None:
    """Fields that a rival keeps changing are repaired at once a few times, then ever more rarely, with a condition."""
    operator.start(*BREAKER)
    converged(admin, key)
    child = child_key(key)
    edits = {
        "replaced": [selector_edit(key)],
        "removed": [label_edit(key, SERVICE, None)],
        "by turns": [selector_edit(key), label_edit(key, SERVICE)],
    }[how]
    mark = audit.mark()
    with rival_writing(admin, *edits) as rival:
        seen = wait_contended(admin, key)
        time.sleep(6)
    writes = writes_to(audit, SERVICE, child, mark)
    contended = condition(seen, "Contended")
    wait_until(lambda: not drift_of(admin, key), 2 * CAP_S, "the repair after the rival has stopped")
    repaired = admin.wait_until(ENVOY_PROXY, key, lambda live: not condition(live, "Contended"), 4 * CAP_S)

    assert rival.edits_made >= THRESHOLD
    # Pauses of 0.5, 1, 2 and 4 s outlast the rival, for each contended field.
    assert len(writes) <= (THRESHOLD + 4) * len(edits)
    if how != "by turns":
        assert_slowed_down([each for each in writes if each.code < 400])
    field = ".metadata.labels.app.kubernetes.io/managed-by" if how == "removed" else ".spec.selector"
    assert field in contended["message"] or how == "by turns"
    assert ("another writer" if how == "removed" else "rival") in contended["message"]
    assert contended["message"].split(" of the ")[0] in condition(seen, "Reconciled")["message"]
    assert holds("Reconciled")(repaired)
    assert condition(repaired, "Stalled") == {}


@pytest.mark.parametrize(
    ("kind", "propagation", "is_stalled"),
    [(CONFIG_MAP, "Background", False), (CONFIG_MAP, "Foreground", False), (SERVICE, "Background", True)],
    ids=["at once", "in the foreground", "while another child is refused"],
)
def test_repairs_against_a_rival_that_deletes_a_child_slow_down_too(
    admin: Kube,
    audit: AuditLog,
    key: Key,
    operator: OperatorProcess,
    *,
    kind: Kind,
    propagation: str,
    is_stalled: bool,
) -> None:
    """The child is created at once a few times, then rarely, with a condition; in the end it stays, like the others."""
    operator.start(*BREAKER)
    converged(admin, key)
    child = child_key(key)
    if is_stalled:
        admin.patch(CONFIG_MAP, child, {"immutable": True, "data": {CLUSTERS_FILE: "{}"}})
        admin.wait_until(ENVOY_PROXY, key, holds("Stalled"))
    others = {each: admin.get(each, child)["metadata"]["uid"] for each in CHILD_KINDS if each != kind}
    mark = audit.mark()
    with rival_writing(
        admin, RivalEdit(kind, child, lambda live: "deletionTimestamp" in live["metadata"], None, propagation)
    ):
        seen = admin.wait_until(ENVOY_PROXY, key, lambda live: condition(live, "Contended"))
        time.sleep(6)
    writes = writes_to(audit, kind, child, mark)
    recovered = admin.wait_until(
        ENVOY_PROXY,
        key,
        lambda live: (is_stalled or holds("Reconciled")(live)) and not condition(live, "Contended"),
        6 * CAP_S,
    )

    assert THRESHOLD <= len(writes) <= THRESHOLD + 4, [str(each) for each in writes]
    assert_slowed_down(writes)
    assert condition(seen, "Contended")["message"] == f"another writer keeps taking the whole object of the {kind}"
    assert bool(condition(recovered, "Stalled")) == is_stalled
    assert set(drift_of(admin, key)) == ({CONFIG_MAP} if is_stalled else set())
    assert {each: admin.get(each, child)["metadata"]["uid"] for each in others} == others


def test_an_edit_of_the_spec_is_applied_at_once_during_contention(
    admin: Kube, audit: AuditLog, key: Key, operator: OperatorProcess
) -> None:
    """While a field's repairs wait, an edit of the spec is applied: of other fields, of this one, and of the record."""
    operator.start(*PATIENT)
    converged(admin, key)
    child = child_key(key)
    port = {"op": "replace", "path": "/spec/ports/0/targetPort", "value": 9999}
    edit = RivalEdit(SERVICE, child, lambda live: bool(live["spec"]["ports"][0]["targetPort"] == 9999), [port])
    with rival_writing(admin, edit, data_edit(key)):
        wait_contended(admin, key)
        assert_at_once(
            lambda: admin.patch(ENVOY_PROXY, key, {"spec": {"replicas": 3}}),
            lambda: admin.get(DEPLOYMENT, child)["spec"]["replicas"] == 3,
            "an edit of the replicas",
        )
        assert_at_once(
            lambda: admin.patch(ENVOY_PROXY, key, {"spec": {"registration": {"hostname": "a.example.com"}}}),
            lambda: (
                admin.get(PROXY_REGISTRATION, record_key(admin.get(ENVOY_PROXY, key)))["spec"].get("hostname")
                == "a.example.com"
            ),
            "an edit of the hostname",
        )
        mark = audit.mark()
        listener = {"name": "web", "port": 80, "routes": [{"backend": "app"}]}
        assert_at_once(
            lambda: admin.patch(ENVOY_PROXY, key, {"spec": {"listeners": [listener]}}),
            lambda: any(
                each.request is not None and each.request["spec"]["ports"][0]["targetPort"] == "web"
                for each in writes_to(audit, SERVICE, child, mark)
            ),
            "an edit of the contended field itself",
        )
        assert [each.code for each in writes_to(audit, CONFIG_MAP, child, mark)] == [200], "and of its configuration"
        admin.wait_until(ENVOY_PROXY, key, lambda live: live["status"]["observedGeneration"] == 4)


def test_contention_over_one_child_delays_no_other(admin: Kube, key: Key, operator: OperatorProcess) -> None:
    """While the ConfigMap is contended, drift of its other fields, of other children and of the record is repaired."""
    operator.start(*PATIENT)
    proxy = converged(admin, key)
    child = child_key(key)
    with rival_writing(admin, data_edit(key)):
        wait_contended(admin, key)

        def is_repaired(kind: Kind) -> Callable[[], bool]:
            return lambda: kind not in drift_of(admin, key)

        image = [{"op": "replace", "path": f"{CONTAINER}/image", "value": "other"}]
        assert_at_once(
            lambda: admin.patch(DEPLOYMENT, child, image, patch_type="json"), is_repaired(DEPLOYMENT), "the Deployment"
        )
        assert_at_once(
            lambda: admin.patch(SERVICE, child, {"spec": {"type": "NodePort"}}), is_repaired(SERVICE), "the Service"
        )
        assert_at_once(
            lambda: admin.delete(SERVICE, child),
            lambda: admin.find(SERVICE, child) is not None,
            "a Service that was deleted",
        )
        assert_at_once(
            lambda: admin.patch(CONFIG_MAP, child, {"metadata": {"labels": {LABEL_MANAGED_BY: "x"}}}),
            lambda: admin.get(CONFIG_MAP, child)["metadata"]["labels"][LABEL_MANAGED_BY] == "operator-app",
            "another field of the same ConfigMap",
        )
        assert_at_once(
            lambda: admin.patch(PROXY_REGISTRATION, record_key(proxy), {"spec": {"address": "elsewhere"}}),
            lambda: admin.get(PROXY_REGISTRATION, record_key(proxy))["spec"]["address"] != "elsewhere",
            "the record",
        )
        assert holds("Registered")(admin.get(ENVOY_PROXY, key))


def test_contention_over_the_record_ends_by_itself_too(
    admin: Kube, audit: AuditLog, key: Key, operator: OperatorProcess
) -> None:
    """A record that a rival keeps changing is repaired ever more slowly, and once more when the rival has stopped."""
    operator.start(*BREAKER)
    proxy = converged(admin, key)
    record = record_key(proxy)
    edit = RivalEdit(
        PROXY_REGISTRATION,
        record,
        lambda live: bool(live["spec"]["address"] == "rival"),
        {"spec": {"address": "rival"}},
    )
    mark = audit.mark()
    with rival_writing(admin, edit):
        contended = admin.wait_until(ENVOY_PROXY, key, is_refused("Registered", "Contended"))
        time.sleep(4)
    writes = writes_to(audit, PROXY_REGISTRATION, record, mark)
    admin.wait_until(PROXY_REGISTRATION, record, lambda live: live["spec"]["address"] != "rival", 2 * CAP_S)
    admin.wait_until(ENVOY_PROXY, key, holds("Registered"))

    assert "rival keeps taking .spec.address" in condition(contended, "Registered")["message"]
    assert_slowed_down(writes)


@pytest.mark.parametrize("is_changed", [False, True], ids=["data kept", "data changed"])
def test_an_immutable_child_stalls_alone(
    admin: Kube, audit: AuditLog, key: Key, operator: OperatorProcess, *, is_changed: bool
) -> None:
    """A ConfigMap that a rival made immutable: Stalled names the field, all else is repaired, and a deletion helps."""
    operator.start()
    converged(admin, key)
    child = child_key(key)
    mark = audit.mark()
    admin.patch(CONFIG_MAP, child, {"immutable": True} | ({"data": {CLUSTERS_FILE: "{}"}} if is_changed else {}))
    if not is_changed:
        time.sleep(1)
        assert writes_to(audit, CONFIG_MAP, child, mark) == [], "as long as it is as declared, nothing is wrong"
        routes = [{"match": {"pathPrefix": "/new"}, "backend": "app"}]
        admin.patch(ENVOY_PROXY, key, {"spec": {"listeners": [{"name": "http", "port": 80, "routes": routes}]}})
    stalled = admin.wait_until(ENVOY_PROXY, key, holds("Stalled"))
    assert is_refused("Reconciled", "Invalid")(stalled)
    assert "data" in condition(stalled, "Stalled")["message"]
    assert f"ConfigMap {child}" in condition(stalled, "Stalled")["message"]

    admin.patch(SERVICE, child, {"spec": {"selector": {"app": "other"}}})
    wait_until(lambda: SERVICE not in drift_of(admin, key), what="the repair of the Service")
    admin.patch(CONFIG_MAP, child, {"metadata": {"labels": {"noise": "1"}}})
    time.sleep(3)
    refused = [each.code for each in writes_to(audit, CONFIG_MAP, child, mark)]
    assert refused == [422], "what was refused is not sent again"
    quiet = audit.mark()
    time.sleep(2)
    assert [
        each for each in audit.entries(quiet) if each.user == OPERATOR_USER and each.namespace == key.namespace
    ] == []

    uid = admin.get(CONFIG_MAP, child)["metadata"]["uid"]
    admin.delete(CONFIG_MAP, child)
    recovered = wait_reconciled(admin, key)
    assert condition(recovered, "Stalled") == {}
    assert drift_of(admin, key) == {}
    fresh = admin.get(CONFIG_MAP, child)
    assert fresh["metadata"]["uid"] != uid
    assert "immutable" not in fresh


def test_setting_and_unsetting_a_field_is_no_contention(admin: Kube, key: Key, operator: OperatorProcess) -> None:
    """Each edit of a user who sets and unsets the same field again and again is applied at once."""
    operator.start(*PATIENT)
    converged(admin, key)
    child = child_key(key)

    def annotations() -> dict[str, str]:
        found: dict[str, str] = admin.get(SERVICE, child)["metadata"].get("annotations", {})
        return found

    for _ in range(2 * THRESHOLD):
        admin.patch(ENVOY_PROXY, key, {"spec": {"service": {"annotations": {"example.com/a": "1"}}}})
        wait_until(lambda: annotations().get("example.com/a") == "1", AT_ONCE_S, "an annotation that was set")
        admin.patch(ENVOY_PROXY, key, {"spec": {"service": {"annotations": None}}})
        wait_until(lambda: "example.com/a" not in annotations(), AT_ONCE_S, "an annotation that was unset")
    assert condition(wait_reconciled(admin, key), "Contended") == {}
