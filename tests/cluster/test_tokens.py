"""The operator goes on for long: when its tokens expire, and with all that it has kept in memory."""

import uuid
from collections import defaultdict
from datetime import datetime

import pytest

from operator_app.api.kinds import ENVOY_PROXY, NAMESPACE, Key
from tests.cluster.installed import READY_TIMEOUT_S, Installed, restarts
from tests.cluster.rotation import LIFETIME_S, Rotation
from tests.e2e.controlplane import AuditEntry, Report
from tests.e2e.failover import waits_until_applied
from tests.e2e.proxies import OPERATOR_USER, a_proxy, wait_reconciled

pytestmark = pytest.mark.timeout(900)
LONGEST_WAIT_S = 20.0

PROXIES = 200
PEAK = """
import pathlib
files = ('/sys/fs/cgroup/memory.peak', '/sys/fs/cgroup/memory/memory.max_usage_in_bytes')
print(next(int(path.read_text()) for path in map(pathlib.Path, files) if path.exists()))
"""
"""Prints the most memory that the container has ever had, in bytes: version 2 of cgroups, then version 1."""

LIMIT_BYTES = 512 << 20
"""As the Deployment has it."""


def test_no_edit_is_lost_when_tokens_expire(installed: Installed, rotation: Rotation, report: Report) -> None:
    """Over a run longer than a token lasts, no request is refused, no replica restarts, and every edit is applied."""
    rotation.wait_for_the_end_of_the_first_tokens()
    rotation.stop_editing()
    assert rotation.load.lost() == []
    pods = [pod for pod in installed.pods() if pod["metadata"]["name"] in rotation.pods]
    assert len(pods) == 2
    assert restarts(pods) == 0

    entries = installed.audit.entries()
    ours = [each for each in entries if each.user == OPERATOR_USER and each.received_at >= rotation.since]
    last_use = last_uses(ours)
    for pod in rotation.pods:
        used = sorted(last_use[pod].values())
        assert len(used) >= 2, f"{pod} has not changed its token"
        assert used[0] < rotation.since + rotation.longest_life, "the first token is not used when it has expired"
    refused = [each for each in entries if each.code == 401 and each.user_agent.startswith("operator-app/")]
    assert [str(each) for each in refused] == []
    longest_s = max(wait.total_seconds() for wait in waits_until_applied(ours, rotation.load.edits))
    report(
        f"tokens: {len(rotation.load.edits)} edits while tokens of {LIFETIME_S} s expired, none lost; "
        f"the longest wait was {longest_s:.2f} s"
    )
    assert longest_s < LONGEST_WAIT_S


def last_uses(entries: list[AuditEntry]) -> dict[str, dict[str, datetime]]:
    """When each token was last used, by the Pod that it was issued to."""
    found: defaultdict[str, dict[str, datetime]] = defaultdict(dict)
    for each in entries:
        found[each.pod][each.credential] = max(each.received_at, found[each.pod].get(each.credential, each.received_at))
    return found


def test_memory_stays_far_below_its_limit(installed: Installed, report: Report) -> None:
    """With 200 proxies more than before, after all that was done to it, a replica has never had half of its limit."""
    name = f"memory-{uuid.uuid4().hex[:8]}"
    installed.admin.create(NAMESPACE, {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name}})
    keys = [Key(name, f"web-{number}") for number in range(PROXIES)]
    for key in keys:
        installed.admin.create(ENVOY_PROXY, a_proxy(name, key.name, replicas=0))
    for key in keys:
        wait_reconciled(installed.admin, key, READY_TIMEOUT_S)
    pods = [pod["metadata"]["name"] for pod in installed.pods()]
    peaks_bytes = {pod: int(installed.execute(pod, "python", "-c", PEAK)) for pod in pods}
    installed.admin.delete(NAMESPACE, Key("", name))
    report(f"memory: at most {max(peaks_bytes.values()) >> 20} MiB of {LIMIT_BYTES >> 20} MiB")
    assert all(peak < LIMIT_BYTES / 2 for peak in peaks_bytes.values()), peaks_bytes
