"""The pre-stop hook as data; ``tests/e2e/envoy/test_drain.py`` runs it against Envoy."""

import json

from operator_app.envoy import drain


def test_pre_stop_runs_envoy_without_a_shell() -> None:
    """The hook is one program with literal arguments, so that it works in an image that holds nothing but Envoy."""
    command = drain.pre_stop(7)["exec"]["command"]
    assert command[0] == "envoy"
    assert "--disable-hot-restart" in command
    config = json.loads(command[command.index("--config-yaml") + 1])
    assert '"fixed_delay": "7s"' in json.dumps(config)
    assert drain.pre_stop() == drain.pre_stop(drain.DRAIN_S)


def test_drain_helper_opens_no_port() -> None:
    """What the hook binds are abstract sockets of the Pod; the one address it knows is the proxy's admin interface."""
    command = drain.pre_stop()["exec"]["command"]
    config = json.loads(command[command.index("--config-yaml") + 1])
    bound = [config["admin"], *config["static_resources"]["listeners"]]
    assert all(each["address"]["pipe"]["path"].startswith("@") for each in bound)
    assert json.dumps(config).count("socket_address") == 1


def test_grace_period_outlasts_the_drain() -> None:
    """Kubernetes counts the hook's time in the grace period, so the drain has to end before it, with Envoy's exit."""
    assert drain.TERMINATION_GRACE_S - drain.DRAIN_S >= 5
