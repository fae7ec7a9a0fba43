"""What the demo and ``make dev`` stand on: a cluster, a node, the operator under its own ServiceAccount, and their end.

Two ways to the same ``Stage``: ``local_stage`` starts everything here, and everything goes with it; ``borrowed_stage``
uses somebody's cluster, makes there only what is absent, and removes exactly what it made, by UID. What is played on
the stage is not known here.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import httpx2
import yaml
from lightkube.core.exceptions import ConfigError

from operator_app.api.kinds import DEPLOYMENT, ENVOY_PROXY, LEASE, NAMESPACE, PROXY_REGISTRATION, Key, Object, key_of
from operator_app.errors import ConfigurationError
from operator_app.kube.kubeconfig import endpoint
from tests.e2e.controlplane import (
    AuditLog,
    BuildError,
    Cluster,
    ControlPlane,
    ExternalCluster,
    Report,
    StartError,
    ToolchainError,
    apply_crds,
    service_account_user,
)
from tests.e2e.kube import CUSTOM_RESOURCE_DEFINITION, Kube, KubeError, kind_of
from tests.e2e.node import Node, NodeError, NodeUnavailableError
from tests.e2e.operator_process import OPERATOR_NAMESPACE, SERVICE_ACCOUNT, OperatorProcess
from tests.e2e.shipped import CRDS, IDENTITY

OPERATOR: Final = service_account_user(OPERATOR_NAMESPACE, SERVICE_ACCOUNT)
WRITE_VERBS: Final = ("apply", "create", "update", "patch", "delete")
"""The operator's own names for what may change something (``operator_app_api_requests_total``)."""

REMOVAL_TIMEOUT_S: Final = 120.0


class StageError(RuntimeError):
    """The stage can't be set, or something did not happen on it; the message is one sentence."""


EXPECTED_ERRORS: Final = (
    StageError,
    BuildError,
    NodeError,
    StartError,
    ToolchainError,
    ConfigError,
    ConfigurationError,
    KubeError,
    httpx2.HTTPError,
    AssertionError,
    OSError,
    RuntimeError,
)
"""What may go wrong without being a bug of the demo; ``sentence`` says it. ``TimeoutError`` is an ``OSError``."""


def sentence(error: BaseException) -> str:
    """An error as one line: the first of its message, without what follows as evidence."""
    lines = str(error).strip().splitlines()
    return lines[0].rstrip(":") if lines else type(error).__name__


def objects_in(*files: Path) -> list[Object]:
    """Every object in YAML files, in their order."""
    return [each for file in files for each in yaml.safe_load_all(file.read_text(encoding="utf-8")) if each]


@dataclass(frozen=True, slots=True)
class Removals:
    """What has to be removed when ``resources`` close, last made first; by UID, so that nobody else's object is hit."""

    admin: Kube
    report: Report
    resources: ExitStack

    def of(self, made: Object) -> None:
        """Remove exactly this object then, and wait until it is gone."""
        self.resources.callback(self._remove, made)

    def of_crds(self, made: list[Object]) -> None:
        """Remove these kinds then, unless somebody else has come to use them: their objects would go along."""
        self.resources.callback(self._remove_crds, made)

    def _remove(self, made: Object) -> None:
        kind, key, uid = kind_of(made), key_of(made), made["metadata"]["uid"]
        live = self.admin.find(kind, key)
        if live is None or live["metadata"]["uid"] != uid:
            return
        try:
            self.admin.delete(kind, key, uid=uid)
        except KubeError as error:
            if error.code not in (httpx2.codes.NOT_FOUND, httpx2.codes.CONFLICT):
                raise
        self.admin.wait_gone(kind, key, uid=uid, timeout_s=REMOVAL_TIMEOUT_S)
        self.report(f"removed: {kind} {key}")

    def _remove_crds(self, made: list[Object]) -> None:
        if made and (theirs := _all_of_ours(self.admin)):
            self.report(f"the CRDs stay, since others use them: {', '.join(theirs)}")
            return
        for crd in made:
            self._remove(crd)


@dataclass(frozen=True, slots=True)
class Stage:
    """A cluster with a running operator. ``audit`` is None on a borrowed cluster, whose log can't be read from here.

    ``node`` is None there, too, as it has nodes of its own, and on a machine where none can run.
    """

    cluster: Cluster
    admin: Kube
    operator: OperatorProcess
    node: Node | None
    audit: AuditLog | None
    _removals: "Removals | None" = field(repr=False)

    @property
    def is_borrowed(self) -> bool:
        """Whether the cluster is somebody's, and has nodes of its own."""
        return self._removals is not None

    @property
    def runs_pods(self) -> bool:
        """Whether Pods run, so that a proxy can be asked."""
        return self.is_borrowed or self.node is not None

    def make(self, manifests: Sequence[Object]) -> None:
        """Make objects that do not exist yet; on a borrowed cluster they are removed with the stage."""
        _make(self.admin, manifests, self._removals)

    def writes_from_now(self) -> Callable[[], list[str]]:
        """The writes of objects that the operator sends from now on, each described in a few words.

        From the API server's audit log where there is one, else from the operator's own metrics. Renewals of its Leases
        are no such writes: they say that it lives.
        """
        audit = self.audit
        if audit is not None:
            mark = audit.mark()
            return lambda: [str(each) for each in audit.writes(OPERATOR, mark) if each.resource != LEASE.plural]
        before = self._writes_sent()
        return lambda: list((self._writes_sent() - before).elements())

    def _writes_sent(self) -> Counter[str]:
        sent: Counter[str] = Counter()
        for labels, value in self.operator.series("operator_app_api_requests_total"):
            if labels["verb"] in WRITE_VERBS and labels["kind"] != LEASE.kind:
                sent[f"{labels['verb']} {labels['kind']}"] += int(value)
        return sent


@contextmanager
def local_stage(logs: Path, report: Report) -> Iterator[Stage]:
    """A control plane, a node where one can run, and the operator on this machine; all of it is gone afterwards.

    ``logs`` is an existing directory. Raises one of ``EXPECTED_ERRORS``.
    """
    with ExitStack() as resources:
        cluster = resources.enter_context(ControlPlane(crds=CRDS, report=report))
        admin = resources.enter_context(Kube(cluster.kubeconfig))
        local = Node(cluster, report, logs)
        resources.callback(local.stop)
        # Both take seconds, and neither needs the other.
        with ThreadPoolExecutor(1) as background:
            starting = background.submit(local.start)
            _make(admin, objects_in(*IDENTITY), None)
            node: Node | None = local
            try:
                starting.result()
            except NodeUnavailableError as error:
                report(f"node: {error}")
                node = None
        operator = _running_operator(cluster, logs, report, resources, node)
        yield Stage(cluster, admin, operator, node, cluster.audit(), None)


@contextmanager
def borrowed_stage(kubeconfig: Path, logs: Path, report: Report, *, wants_namespace: str) -> Iterator[Stage]:
    """The operator, run here on the cluster of ``kubeconfig``; what was made there is removed afterwards.

    Refuses, before anything is changed, a cluster where the operator would meet another one or somebody's proxies, or
    where ``wants_namespace`` exists. Raises one of ``EXPECTED_ERRORS``.
    """
    server = endpoint(kubeconfig, None, environ={}).server  # says in one sentence what is wrong with the file
    with ExitStack() as resources:
        cluster = resources.enter_context(ExternalCluster(kubeconfig))
        admin = resources.enter_context(Kube(kubeconfig))
        try:
            _refuse_to_disturb(admin, wants_namespace)
        except httpx2.TransportError as error:
            raise StageError(f"no answer from {server}, the cluster of {kubeconfig}: {error}") from error
        removals = Removals(admin, report, resources)
        removals.of_crds(made := [])
        absent = [each for each in CRDS if admin.find(CUSTOM_RESOURCE_DEFINITION, key_of(objects_in(each)[0])) is None]
        apply_crds(admin, absent)
        made += [admin.get(CUSTOM_RESOURCE_DEFINITION, key_of(each)) for each in objects_in(*absent)]
        _make(admin, objects_in(*IDENTITY), removals)
        report(f"cluster: {kubeconfig} has the CRDs and the operator's RBAC")
        operator = _running_operator(cluster, logs, report, resources)
        yield Stage(cluster, admin, operator, None, None, removals)


def _running_operator(
    cluster: Cluster, logs: Path, report: Report, resources: ExitStack, node: Node | None = None
) -> OperatorProcess:
    kubeconfig = cluster.kubeconfig_for(OPERATOR_NAMESPACE, SERVICE_ACCOUNT)
    operator = OperatorProcess(kubeconfig, logs / "operator.log", node)
    resources.callback(operator.stop)
    operator.start()
    report(f"operator: running as {OPERATOR}, its watches are in sync")
    return operator


def _refuse_to_disturb(admin: Kube, wants_namespace: str) -> None:
    if admin.find(NAMESPACE, Key("", wants_namespace)) is not None:
        raise StageError(f"the cluster has a namespace {wants_namespace} already, which the demo would fill and delete")
    deployment = admin.find(DEPLOYMENT, Key(OPERATOR_NAMESPACE, SERVICE_ACCOUNT))
    if deployment is not None and deployment["spec"]["replicas"] > 0:
        raise StageError(f"an operator is installed in {OPERATOR_NAMESPACE}: scale it to 0, or two would both write")
    if theirs := _all_of_ours(admin):
        raise StageError(f"the cluster has proxies, which the demo's operator would act on: {', '.join(theirs)}")


def _all_of_ours(admin: Kube) -> list[str]:
    """Every object of the operator's own kinds; nothing where the kinds are not served."""
    found: list[str] = []
    for kind in (ENVOY_PROXY, PROXY_REGISTRATION):
        try:
            found += [f"{kind} {key_of(each)}" for each in admin.list(kind)]
        except KubeError as error:
            if error.code != httpx2.codes.NOT_FOUND:
                raise
    return found


def _make(admin: Kube, manifests: Sequence[Object], removals: "Removals | None") -> None:
    """Make what is absent and leave what exists."""
    for manifest in manifests:
        kind = kind_of(manifest)
        if admin.find(kind, key_of(manifest)) is None:
            made = admin.apply(kind, manifest, field_manager="demo")
            if removals is not None:
                removals.of(made)
