"""Stored ProxyRegistrations for tests."""

from typing import Any

from operator_app.api.kinds import Key, Object

PROXY = Key("team-a", "checkout")


def an_entry(uid: str = "one", proxy: Key = PROXY, **spec: Any) -> Object:
    """A stored ProxyRegistration; keywords replace fields of its spec."""
    return {
        "metadata": {"name": f"proxy-{uid}", "namespace": "edge-system", "generation": 3},
        "spec": {
            "proxy": {"namespace": proxy.namespace, "name": proxy.name, "uid": uid},
            "registry": "dns",
            "state": "Registered",
        }
        | spec,
    }
