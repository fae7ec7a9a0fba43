"""The configuration of a kind cluster has what the tests of ``tests/cluster`` need."""

from pathlib import Path

import yaml

from tests.cluster.kind import configuration


def test_a_kind_cluster_has_an_audit_log_that_is_seen_outside_and_two_workers(tmp_path: Path) -> None:
    """What the API server is told to read and write is mounted from the directory that was named."""
    control_plane, *workers = configuration(tmp_path)["nodes"]
    assert [each["role"] for each in workers] == ["worker", "worker"]
    (patch,) = map(yaml.safe_load, control_plane["kubeadmConfigPatches"])
    arguments = patch["apiServer"]["extraArgs"]
    in_container = {each["containerPath"]: Path(each["hostPath"]) for each in control_plane["extraMounts"]}
    log = Path(arguments["audit-log-path"])
    assert in_container[str(log.parent)] == tmp_path / "audit"
    assert in_container[arguments["audit-policy-file"]] == tmp_path / "audit-policy.yaml"
    in_pod = {each["mountPath"] for each in patch["apiServer"]["extraVolumes"]}
    assert in_pod == {str(log.parent), arguments["audit-policy-file"]}
    assert "OwnerReferencesPermissionEnforcement" in arguments["enable-admission-plugins"]
