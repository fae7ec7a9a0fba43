"""The operator with a defect: it renders the path ``/refused`` as a field that no Envoy knows.

    python -m tests.e2e.reload.refused_operator

So that what an Envoy refuses can be tested, which the operator itself does not render.
"""

import sys

from operator_app.__main__ import main
from operator_app.api.models import Route
from operator_app.envoy import listeners
from operator_app.envoy.messages import Message

_route = listeners._route


def _with_an_unknown_field(route: Route) -> Message:
    message = _route(route)
    return message | {"no_such_field": True} if message["match"].get("path") == "/refused" else message


if __name__ == "__main__":
    listeners._route = _with_an_unknown_field
    sys.exit(main(["run", *sys.argv[1:]]))
