"""How one tenant's proxy is drained before its Pod ends. Pure."""

import json
from typing import Final

from operator_app.api.models import ADMIN_PORT
from operator_app.envoy.messages import Message, address, extension, http_connection_manager, router

DRAIN_S: Final = 20
"""How long a terminating proxy goes on serving: time for endpoints to be forgotten and for requests to finish."""

TERMINATION_GRACE_S: Final = DRAIN_S + 10
"""A Pod's grace period: starting to drain, the drain, and Envoy's own exit, with seconds to spare."""


def pre_stop(drain_s: int = DRAIN_S) -> Message:
    """The ``lifecycle.preStop`` of a container that drains its Envoy for ``drain_s`` seconds before SIGTERM.

    While it runs, the readiness listener answers 503, every HTTP response ends its connection (``connection: close``,
    GOAWAY) and everything is served, new connections too, since endpoints are forgotten late. TCP connections are left
    alone. It ends about a second after ``drain_s``, whatever Envoy does, and what then still runs is cut.

    The command is Envoy itself, a second one, as the client of the admin interface: an image without a shell has
    nothing else, and nothing has to be opened to the network (docs/adr/0005-draining.md).
    """
    config = json.dumps(_drain_bootstrap(drain_s), separators=(",", ":"), sort_keys=True)
    options = ("--disable-hot-restart", "--concurrency", "1", "--log-level", "off")
    return {"exec": {"command": ["envoy", "--config-yaml", config, *options]}}


def _drain_bootstrap(drain_s: int) -> Message:
    """An Envoy that fails the proxy's health check, again and again, and ends itself after ``drain_s`` seconds.

    Health checks are the requests that Envoy sends on its own. One goes to the proxy's admin interface; the other, to
    this Envoy's own, through a listener that holds it back for ``drain_s``. Both interfaces of the helper are abstract
    sockets of the Pod's network namespace: no port, no file.
    """
    own_admin = {"pipe": {"path": "@operator-app/drain/admin"}}
    delayed = {"pipe": {"path": "@operator-app/drain/delayed"}}
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
                _static_cluster("own-admin", own_admin),
                _static_cluster("proxy-admin", address("127.0.0.1", ADMIN_PORT))
                | {"health_checks": [_repeated_post("/healthcheck/fail", timeout_s=1)]},
                _static_cluster("delayed", delayed)
                | {"health_checks": [_repeated_post("/quitquitquit", timeout_s=drain_s + 10)]},
            ],
        },
    }


def _repeated_post(path: str, *, timeout_s: int) -> Message:
    return {
        "http_health_check": {"path": path, "method": "POST", "host": "drain"},
        "timeout": f"{timeout_s}s",
        "interval": "1s",
        # Envoy checks clusters without traffic once a minute unless told otherwise.
        "no_traffic_interval": "1s",
        "no_traffic_healthy_interval": "1s",
        "healthy_threshold": 1,
        "unhealthy_threshold": 1,
    }


def _static_cluster(name: str, address: Message) -> Message:
    return {
        "name": name,
        "type": "STATIC",
        "load_assignment": {
            "cluster_name": name,
            "endpoints": [{"lb_endpoints": [{"endpoint": {"address": address}}]}],
        },
    }
