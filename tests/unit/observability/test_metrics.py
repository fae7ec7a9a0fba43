"""Metrics of tenants: series of their own up to a bound, and none for a tenant that waits for nothing."""

import pytest

from operator_app.observability.metrics import OTHER_TENANTS, TENANT_LABELS, Backlog, Metrics


def test_tenants_have_series_of_their_own_up_to_a_bound() -> None:
    """However many tenants there are, the number of series is bounded; the tenants beyond share one series."""
    metrics = Metrics()
    for number in range(TENANT_LABELS + 10):
        metrics.count_reconcile(f"team-{number}")
    metrics.show_backlogs(Backlog(f"team-{number}", depth=number, oldest_s=float(number)) for number in range(100))
    value = metrics.registry.get_sample_value
    assert value("operator_app_tenant_rounds_total", {"tenant": "team-0"}) == 1
    assert value("operator_app_tenant_rounds_total", {"tenant": OTHER_TENANTS}) == 10
    assert value("operator_app_tenant_queue_depth", {"tenant": "team-99"}) == 99
    assert value("operator_app_tenant_queue_depth", {"tenant": OTHER_TENANTS}) == sum(range(50))
    assert value("operator_app_tenant_oldest_seconds", {"tenant": OTHER_TENANTS}) == 49
    series = [sample for family in metrics.registry.collect() for sample in family.samples if "tenant" in sample.labels]
    assert len({each.labels["tenant"] for each in series}) <= 2 * TENANT_LABELS + 1


def test_a_backlog_that_is_gone_is_not_shown() -> None:
    """A tenant that waits for nothing leaves no series behind."""
    metrics = Metrics()
    metrics.show_backlogs([Backlog("team-a", 3, 1.0)])
    metrics.show_backlogs([])
    assert metrics.registry.get_sample_value("operator_app_tenant_queue_depth", {"tenant": "team-a"}) is None


def test_a_backlog_that_stays_is_shown_at_any_moment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another thread may scrape at any moment, so the series of a tenant that still waits is never absent."""
    metrics = Metrics()
    metrics.show_backlogs([Backlog("team-a", 3, 1.0)])
    for gauge in (metrics.tenant_depth, metrics.tenant_oldest):
        monkeypatch.setattr(gauge, "clear", lambda: pytest.fail("the series is missing for a moment"))
    metrics.show_backlogs([Backlog("team-a", 4, 2.0)])
    assert metrics.registry.get_sample_value("operator_app_tenant_queue_depth", {"tenant": "team-a"}) == 4
