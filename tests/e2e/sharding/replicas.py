"""Three replicas of the operator, as fixtures give them to tests."""

from collections.abc import Iterator
from pathlib import Path

from tests.e2e.operator_process import OperatorProcess


def three_replicas(kubeconfig: Path, folder: Path) -> Iterator[list[OperatorProcess]]:
    """Three replicas that are not running yet; at the end no reconcile has crashed and no write changed nothing."""
    processes = [OperatorProcess(kubeconfig, folder / f"replica-{number}.log") for number in range(3)]
    yield processes
    for each in (each for each in processes if each.replica):
        if each.is_running:
            assert each.metric("operator_app_writes_total", outcome="unchanged") == 0, each.log_text()
        each.stop()
        assert not any(line.get("event") == "reconcile_crashed" for line in each.log()), each.log_text()
