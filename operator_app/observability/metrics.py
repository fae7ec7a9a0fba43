"""The Prometheus metrics of one operator: names, labels and the bound on the number of series.

What the numbers mean for a proxy belongs in its status, not here.
"""

from collections.abc import Iterable
from heapq import nlargest
from operator import attrgetter
from typing import Final, NamedTuple

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

TENANT_LABELS: Final = 50
"""This many tenants get series of their own; all others share one."""

OTHER_TENANTS: Final = "(others)"


class Backlog(NamedTuple):
    """One tenant's keys that could be reconciled now (``depth``), and the longest time one has waited, in seconds."""

    tenant: str
    depth: int
    oldest_s: float


_depth = attrgetter("depth")


class Metrics:
    """All metrics of one operator, in a registry of their own."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._tenants: set[str] = set()
        self._shown: set[str] = set()
        self._define_api_server()
        self._define_reconciles()
        self._define_resync()
        self._define_shards()
        self._define_tenants()

    def _counter(self, name: str, help_text: str, *labels: str) -> Counter:
        return Counter(name, help_text, labels, registry=self.registry)

    def _gauge(self, name: str, help_text: str, *labels: str) -> Gauge:
        return Gauge(name, help_text, labels, registry=self.registry)

    def _histogram(self, name: str, help_text: str, *labels: str) -> Histogram:
        return Histogram(name, help_text, labels, registry=self.registry)

    def _define_api_server(self) -> None:
        """Requests, and the watches that they open."""
        self.requests = self._counter(
            "operator_app_api_requests",
            "Requests to the API server; code is the HTTP status, or none when there was no answer.",
            "verb",
            "kind",
            "code",
        )
        self.request_seconds = self._histogram(
            "operator_app_api_request_duration_seconds", "Time until the API server's answer.", "verb"
        )
        self.watch_restarts = self._counter(
            "operator_app_watch_restarts",
            "Watches that went on over a new connection (reconnect) or from a new list (relist).",
            "kind",
            "how",
        )
        self.received_bytes = self._counter(
            "operator_app_received_bytes", "Bytes that lists and watches of a kind have brought.", "kind"
        )
        self.received_objects = self._counter(
            "operator_app_received_objects", "Objects on lists and events of watches that were looked at.", "kind"
        )
        self.watch_silent = self._gauge(
            "operator_app_watch_silent_seconds",
            "For how long the longest-silent watch of a kind has delivered nothing, bookmarks included.",
            "kind",
        )
        self.loop_lag = self._histogram(
            "operator_app_event_loop_lag_seconds", "By how much a pause of a second of the event loop was longer."
        )
        self.watch_errors = self._counter("operator_app_watch_errors", "Lists and watches that failed.", "kind")

    def _define_reconciles(self) -> None:
        """What reconciles do, and how many keys wait for one."""
        self.writes = self._counter(
            "operator_app_writes",
            "Writes by what they changed; unchanged is an avoidable write and stays at zero.",
            "kind",
            "outcome",
        )
        self.reconciles = self._counter("operator_app_rounds", "Rounds by how they ended.", "result")
        self.reconcile_seconds = self._histogram("operator_app_round_duration_seconds", "Duration of a round.")
        self.drift_repaired = self._counter(
            "operator_app_drift_repaired",
            "Children in which fields that somebody else had changed were restored, or that had been deleted.",
            "kind",
        )
        self.queued = self._gauge("operator_app_queue_keys", "Keys that are ready, delayed or in flight.")

    def _define_resync(self) -> None:
        """What the resync and its audit find."""
        self.resync_missed = self._counter(
            "operator_app_sweep_missed", "Changes that a sweep's list showed and the watch had not.", "kind"
        )
        self.audit_findings = self._gauge(
            "operator_app_audit_findings",
            "What the last sweep found not to fit between the proxies and what is known of them here and outside.",
            "kind",
        )

    def _define_shards(self) -> None:
        """Shards, and the writes that a lost shard stopped."""
        self.shards_held = self._gauge("operator_app_shards_held", "Shards that this replica works.")
        self.lease_transitions = self._counter(
            "operator_app_lease_transitions",
            "Shards taken, released, lost to another replica, or lapsed because no renewal succeeded in time.",
            "how",
        )
        self.fenced_writes = self._counter(
            "operator_app_fenced_writes",
            "Writes that were not sent, because the right to write for the shard had run out.",
        )

    def _define_tenants(self) -> None:
        """What tenants wait for and get; the number of series is bounded by ``TENANT_LABELS``."""
        self.tenant_depth = self._gauge(
            "operator_app_tenant_queue_depth",
            "Rounds that could run now if there were workers enough, for the tenants that wait for most.",
            "tenant",
        )
        self.tenant_oldest = self._gauge(
            "operator_app_tenant_oldest_seconds",
            "For how long the longest-waiting of these rounds has been wanted.",
            "tenant",
        )
        self.tenant_reconciles = self._counter(
            "operator_app_tenant_rounds",
            "Rounds by tenant; the first tenants to have one get series of their own.",
            "tenant",
        )

    def count_reconcile(self, tenant: str) -> None:
        """Count a reconcile, under the tenant's own name for the first ``TENANT_LABELS`` tenants."""
        if len(self._tenants) < TENANT_LABELS:
            self._tenants.add(tenant)
        self.tenant_reconciles.labels(tenant if tenant in self._tenants else OTHER_TENANTS).inc()

    def show_backlogs(self, backlogs: Iterable[Backlog]) -> None:
        """Export the ``TENANT_LABELS`` deepest backlogs one by one, and all others as one series."""
        backlogs = tuple(backlogs)
        shown = nlargest(TENANT_LABELS, backlogs, key=_depth)
        if len(backlogs) > TENANT_LABELS:
            own = {each.tenant for each in shown}
            oldest_s = max(each.oldest_s for each in backlogs if each.tenant not in own)
            shown.append(Backlog(OTHER_TENANTS, sum(map(_depth, backlogs)) - sum(map(_depth, shown)), oldest_s))
        for each in shown:
            self.tenant_depth.labels(each.tenant).set(each.depth)
            self.tenant_oldest.labels(each.tenant).set(each.oldest_s)
        # Removed last and one by one: another thread may scrape at any moment, and a series that stays is never absent.
        for gone in self._shown - {each.tenant for each in shown}:
            self.tenant_depth.remove(gone)
            self.tenant_oldest.remove(gone)
        self._shown = {each.tenant for each in shown}
