"""Fixtures of the tests of children: where the test's proxy is, and an operator for all tests of a file."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from operator_app.api.kinds import Key
from tests.e2e.operator_process import OperatorProcess


@pytest.fixture
def key(namespace: str) -> Key:
    """The address of the test's proxy."""
    return Key(namespace, "web")


@pytest.fixture(scope="module")
def one_operator(operator_kubeconfig: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[OperatorProcess]:
    """One operator for all tests of a file, in which no round crashed and no write was avoidable."""
    process = OperatorProcess(operator_kubeconfig, tmp_path_factory.mktemp("operator") / "operator.log")
    process.start()
    yield process
    avoidable = process.metric("operator_app_writes_total", outcome="unchanged")
    process.stop()
    assert avoidable == 0, process.log_text()
    assert not any(line.get("event") in {"reconcile_crashed", "noncanonical"} for line in process.log())
