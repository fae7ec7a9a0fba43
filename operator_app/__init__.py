"""The EnvoyProxy operator: one custom resource gives a tenant its own Envoy.

Data flows one way through the rooms of this package::

    watch -> store -> workqueue -> reconcile -> desired -> apply -> status

Rooms that are pure (``api``, ``envoy``, ``desired``, ``ownership``, ``workqueue``, ``store``) do no I/O and read no
clock; the contracts in ``pyproject.toml`` hold the arrows.
"""
