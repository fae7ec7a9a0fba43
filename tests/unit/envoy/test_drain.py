"""The pre-stop hook as data; ``tests/e2e/envoy/test_drain.py`` runs it against Envoy."""

import json

from operator_app.envoy import drain, internal


def test_pre_stop_runs_envoy_without_a_shell() -> None:
    """The hook's command is Envoy with literal arguments, so it works in an image without a shell."""
    command = drain.pre_stop(7)["exec"]["command"]
    assert command[0] == "envoy"
    assert "--disable-hot-restart" in command
    config = json.loads(command[command.index("--config-yaml") + 1])
    assert '"fixed_delay": "7s"' in json.dumps(config)
    assert drain.pre_stop() == drain.pre_stop(drain.DRAIN_S)


def test_drain_helper_opens_no_port() -> None:
    """The hook binds and connects to abstract Unix sockets only; there is no TCP address in it."""
    command = drain.pre_stop()["exec"]["command"]
    config = json.loads(command[command.index("--config-yaml") + 1])
    bound = [config["admin"], *config["static_resources"]["listeners"]]
    assert all(each["address"]["pipe"]["path"].startswith("@") for each in bound)
    assert "socket_address" not in json.dumps(config)
    assert json.dumps(config).count(internal.ADMIN_SOCKET) == 1


def test_grace_period_is_longer_than_the_drain() -> None:
    """The grace period, which includes the hook's time, leaves at least 5 s after the drain for Envoy's exit."""
    assert drain.TERMINATION_GRACE_S - drain.DRAIN_S >= 5
