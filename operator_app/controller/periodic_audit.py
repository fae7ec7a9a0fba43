"""The audit that each resync ends with: findings between proxies and records, as metrics and log lines.

What is a finding belongs to ``registration.audit``. Nothing is removed here.
"""

from collections import Counter
from collections.abc import Sequence

import anyio.to_thread
import structlog

from operator_app.controller.scopes import Scopes
from operator_app.kube.store import Store
from operator_app.observability.metrics import Metrics
from operator_app.registration.audit import FindingKind, findings, outside_entries, survey_of
from operator_app.registration.registrar import Registries

log = structlog.get_logger(__name__)


class PeriodicAudit:
    """Compares the store with the registries. ``namespace`` is the operator's own.

    ``namespaces`` are the served ones; without any, all are served. Of these, only what is synced is audited: of other
    namespaces the store says nothing.
    """

    def __init__(
        self,
        store: Store,
        scopes: Scopes,
        registries: Registries,
        metrics: Metrics,
        *,
        namespace: str,
        namespaces: Sequence[str],
    ) -> None:
        self._store = store
        self._scopes = scopes
        self._registries = registries
        self._metrics = metrics
        self._namespace = namespace
        self._namespaces = namespaces

    async def run(self) -> None:
        """Read every registry, set the gauge of each kind of finding, and log what was found.

        What reading a registry raises is logged; the gauges then stay as they are, if it was no ``OperatorError``.
        """
        try:
            outside, failed = await outside_entries(self._registries)
        except Exception:
            # A registry may be a plugin of somebody else; its bug must not end the resyncs.
            log.exception("audit_crashed")
            return
        for name, error in failed.items():
            log.warning("registry_unread", registry=name, error=str(error))
        survey = await survey_of(self._store, outside, namespace=self._namespace, namespaces=self._namespaces)
        # At 10,000 proxies this takes more than a turn on the event loop, and nothing else uses the survey.
        all_found = await anyio.to_thread.run_sync(findings, survey)
        # A record outside that names no proxy can't be judged by a replica that does not know all of them.
        found = [
            each
            for each in all_found
            if (self._scopes.is_whole if each.proxy is None else self._scopes.is_synced(each.proxy.namespace))
        ]
        counts = Counter(each.kind for each in found)
        for kind in FindingKind:
            self._metrics.audit_findings.labels(kind.value).set(counts[kind])
        if found:
            log.warning("audit_findings", **{kind.value: count for kind, count in counts.items()})
