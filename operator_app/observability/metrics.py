"""The Prometheus metrics of one operator: names, labels and the bound on the number of series.

What the numbers mean for a proxy belongs in its status, not here.
"""

from collections.abc import Iterable
from typing import Final, NamedTuple

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

TENANT_LABELS: Final = 50
"""So many tenants have series of their own; all others share one, however many they are."""

OTHER_TENANTS: Final = "(others)"


class Backlog(NamedTuple):
    """What one tenant waits for: rounds that could run now, and for how long the oldest has been wanted (seconds)."""

    tenant: str
    depth: int
    oldest_s: float


class Metrics:
    """All metrics of one operator, in a registry of their own."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._tenants: set[str] = set()
        self._shown: set[str] = set()
        self.requests = Counter(
            "operator_app_api_requests",
            "Requests to the API server; code is the HTTP status, or none when there was no answer.",
            ["verb", "kind", "code"],
            registry=self.registry,
        )
        self.request_seconds = Histogram(
            "operator_app_api_request_duration_seconds",
            "Time until the API server's answer.",
            ["verb"],
            registry=self.registry,
        )
        self.writes = Counter(
            "operator_app_writes",
            "Writes by what they changed; unchanged is an avoidable write and stays at zero.",
            ["kind", "outcome"],
            registry=self.registry,
        )
        self.rounds = Counter("operator_app_rounds", "Rounds by how they ended.", ["result"], registry=self.registry)
        self.round_seconds = Histogram(
            "operator_app_round_duration_seconds", "Duration of a round.", registry=self.registry
        )
        self.watch_restarts = Counter(
            "operator_app_watch_restarts",
            "Watches that went on over a new connection (reconnect) or from a new list (relist).",
            ["kind", "how"],
            registry=self.registry,
        )
        self.watch_errors = Counter(
            "operator_app_watch_errors", "Lists and watches that failed.", ["kind"], registry=self.registry
        )
        self.drift_repaired = Counter(
            "operator_app_drift_repaired",
            "Children in which fields that somebody else had changed were restored, or that had been deleted.",
            ["kind"],
            registry=self.registry,
        )
        self.missed = Counter(
            "operator_app_sweep_missed",
            "Changes that a sweep's list showed and the watch had not.",
            ["kind"],
            registry=self.registry,
        )
        self.audit_findings = Gauge(
            "operator_app_audit_findings",
            "What the last sweep found not to fit between the proxies and what is known of them here and outside.",
            ["kind"],
            registry=self.registry,
        )
        self.shards_held = Gauge("operator_app_shards_held", "Shards that this replica works.", registry=self.registry)
        self.lease_transitions = Counter(
            "operator_app_lease_transitions",
            "Shards taken, released, lost to another replica, or lapsed because no renewal succeeded in time.",
            ["how"],
            registry=self.registry,
        )
        self.fenced_writes = Counter(
            "operator_app_fenced_writes",
            "Writes that were not sent, because the right to write for the shard had run out.",
            registry=self.registry,
        )
        self.queued = Gauge(
            "operator_app_queue_keys", "Keys that are ready, delayed or in flight.", registry=self.registry
        )
        self.tenant_depth = Gauge(
            "operator_app_tenant_queue_depth",
            "Rounds that could run now if there were workers enough, for the tenants that wait for most.",
            ["tenant"],
            registry=self.registry,
        )
        self.tenant_oldest = Gauge(
            "operator_app_tenant_oldest_seconds",
            "For how long the longest-waiting of these rounds has been wanted.",
            ["tenant"],
            registry=self.registry,
        )
        self.tenant_rounds = Counter(
            "operator_app_tenant_rounds",
            "Rounds by tenant; the first tenants to have one get series of their own.",
            ["tenant"],
            registry=self.registry,
        )

    def count_round_of(self, tenant: str) -> None:
        """Count a round, under the tenant's own name for the first ``TENANT_LABELS`` tenants."""
        if len(self._tenants) < TENANT_LABELS:
            self._tenants.add(tenant)
        self.tenant_rounds.labels(tenant if tenant in self._tenants else OTHER_TENANTS).inc()

    def show_backlogs(self, backlogs: Iterable[Backlog]) -> None:
        """Show the ``TENANT_LABELS`` deepest backlogs one by one, and the others as one."""
        deepest = sorted(backlogs, key=lambda each: each.depth, reverse=True)
        shown, others = deepest[:TENANT_LABELS], deepest[TENANT_LABELS:]
        if others:
            shown.append(
                Backlog(OTHER_TENANTS, sum(each.depth for each in others), max(each.oldest_s for each in others))
            )
        for each in shown:
            self.tenant_depth.labels(each.tenant).set(each.depth)
            self.tenant_oldest.labels(each.tenant).set(each.oldest_s)
        # Not all at once and before: another thread may scrape at any moment.
        for gone in self._shown - {each.tenant for each in shown}:
            self.tenant_depth.remove(gone)
            self.tenant_oldest.remove(gone)
        self._shown = {each.tenant for each in shown}
