"""The EnvoyProxy operator: one custom resource gives a tenant its own Envoy.

Data flows in one direction::

    kube.watch -> kube.store -> controller.workqueue -> reconcile -> desired -> apply -> status

Pure modules (among them ``api``, ``envoy``, ``ssa`` and ``desired``) do no I/O and read no clock. The import contracts
in ``pyproject.toml`` enforce both.
"""
