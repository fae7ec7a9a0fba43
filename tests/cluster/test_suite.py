"""The whole end-to-end suite on a cluster on which the operator was installed, as on anybody's cluster."""

import pytest

from tests.cluster.suite import Suite

OF_OTHER_CLUSTERS = ("E2E_KUBECONFIG names another cluster", "tried on clusters of its own")
"""Why a test may be skipped: it is about the control plane or the node that the tests start themselves."""


@pytest.mark.timeout(3600)
def test_the_end_to_end_suite_passes(suite: Suite) -> None:
    """Every test passes here, too, with the shipped RBAC and Pods that really run; none lacks anything."""
    code = suite.wait()
    output = suite.output.read_text(encoding="utf-8", errors="replace")
    assert code == 0, output[-20000:]
    lacking = {name: why for name, why in suite.skipped().items() if not why.endswith(OF_OTHER_CLUSTERS)}
    assert lacking == {}
