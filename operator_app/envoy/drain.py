"""The pre-stop hook, which drains a proxy before its container gets SIGTERM. Pure.

The reasons are in docs/adr/0005-draining.md.
"""

import json
from typing import Final

from operator_app.envoy.internal import ADMIN_SOCKET
from operator_app.envoy.messages import Message, extension, http_connection_manager, pipe, router, static_cluster

DRAIN_S: Final = 20
"""Seconds for which a terminating proxy goes on serving.

In that time clients stop using its endpoint and active requests finish.
"""

TERMINATION_GRACE_S: Final = DRAIN_S + 10
"""A Pod's termination grace period: the drain, and 10 s for the hook's start and for Envoy's exit."""


def pre_stop(drain_s: int = DRAIN_S) -> Message:
    """The ``lifecycle.preStop`` of a container, which drains its Envoy for ``drain_s`` seconds before SIGTERM.

    While the hook runs, the readiness listener answers 503, every HTTP response closes its connection (``connection:
    close``, GOAWAY), and requests are still served, those of new connections too, since endpoints are removed from load
    balancers with a delay. TCP connections are not touched. The hook exits about one second after ``drain_s``, whether
    or not the proxy answers; requests and connections that are then still active are cut by SIGTERM.

    The command starts a second Envoy as a client of the admin interface, because an image without a shell contains no
    other program, and this way the admin interface stays on a socket inside the Pod.
    """
    config = json.dumps(_drain_bootstrap(drain_s), separators=(",", ":"), sort_keys=True)
    options = ("--disable-hot-restart", "--concurrency", "1", "--log-level", "off")
    return {"exec": {"command": ["envoy", "--config-yaml", config, *options]}}


def _drain_bootstrap(drain_s: int) -> Message:
    """The bootstrap of a helper Envoy that fails the proxy's health check every second and exits after ``drain_s``.

    The only requests that Envoy sends by itself are health checks. One posts to the admin interface of the proxy. The
    other posts to the helper's own admin interface, through a listener that delays it by ``drain_s`` seconds. The
    helper binds two abstract Unix sockets in the Pod's network namespace, no port and no file.
    """
    own_admin = pipe("@operator-app/drain/admin")
    delayed = pipe("@operator-app/drain/delayed")
    delay = extension(
        "envoy.filters.http.fault",
        "filters.http.fault.v3.HTTPFault",
        delay={"fixed_delay": f"{drain_s}s", "percentage": {"numerator": 100}},
    )
    to_own_admin = {"match": {"prefix": "/"}, "route": {"cluster": "own-admin", "timeout": "0s"}}
    return {
        "admin": {"address": own_admin},
        "static_resources": {
            "listeners": [
                {
                    "name": "delayed",
                    "address": delayed,
                    "filter_chains": [
                        {
                            "filters": [
                                http_connection_manager(
                                    stat_prefix="delayed",
                                    stream_idle_timeout="0s",
                                    route_config={
                                        "virtual_hosts": [{"name": "any", "domains": ["*"], "routes": [to_own_admin]}]
                                    },
                                    http_filters=[delay, router()],
                                )
                            ]
                        }
                    ],
                }
            ],
            "clusters": [
                static_cluster("own-admin", own_admin),
                static_cluster("proxy-admin", pipe(ADMIN_SOCKET))
                | {"health_checks": [_repeated_post("/healthcheck/fail", timeout_s=1)]},
                static_cluster("delayed", delayed)
                | {"health_checks": [_repeated_post("/quitquitquit", timeout_s=drain_s + 10)]},
            ],
        },
    }


def _repeated_post(path: str, *, timeout_s: int) -> Message:
    return {
        "http_health_check": {"path": path, "method": "POST", "host": "drain"},
        "timeout": f"{timeout_s}s",
        "interval": "1s",
        # The default for clusters without traffic is one check a minute.
        "no_traffic_interval": "1s",
        "no_traffic_healthy_interval": "1s",
        "healthy_threshold": 1,
        "unhealthy_threshold": 1,
    }
