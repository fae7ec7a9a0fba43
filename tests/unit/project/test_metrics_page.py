"""docs/metrics.md lists every metric that is exported, and no document names another one."""

import re
from typing import Final

from prometheus_client import Counter
from prometheus_client.metrics import MetricWrapperBase

from operator_app.observability.metrics import Metrics
from tests.paths import ROOT

PAGE: Final = ROOT / "docs" / "metrics.md"


def metrics() -> dict[str, list[str]]:
    """The labels of every metric, by the name under which it is queried."""
    collectors = [each for each in vars(Metrics()).values() if isinstance(each, MetricWrapperBase)]
    return {each._name + "_total" * isinstance(each, Counter): list(each._labelnames) for each in collectors}


def test_every_metric_is_listed_and_no_other() -> None:
    """Names and labels in the table of metrics are those that are exported."""
    rows = re.findall(r"^\| `(operator_app_\w+)` \| (.*?) ?\|", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    assert {name: re.findall(r"\w+", labels) for name, labels in rows} == metrics()


def test_no_metric_is_named_that_is_not_exported() -> None:
    """What a user copies into an alert matches something."""
    for file in (ROOT / "README.md", *(ROOT / "docs").glob("*.md")):
        assert set(re.findall(r"\boperator_app_\w+", file.read_text(encoding="utf-8"))) <= set(metrics()), file.name
