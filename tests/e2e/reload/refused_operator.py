"""The operator with a defect: a route of the path ``/refused`` has a field that no Envoy knows.

    python -m tests.e2e.reload.refused_operator

So that what an Envoy refuses can be tested, which the operator itself does not render.
"""

import sys

from operator_app.__main__ import main
from operator_app.envoy import routes
from operator_app.envoy.messages import Message

_entry = routes._entry


def _with_an_unknown_field(
    path: Message, headers: list[Message], queries: list[Message], changes: Message, answer: Message
) -> Message:
    message = _entry(path, headers, queries, changes, answer)
    return message | {"no_such_field": True} if message["match"].get("path") == "/refused" else message


if __name__ == "__main__":
    routes._entry = _with_an_unknown_field
    sys.exit(main(["run", *sys.argv[1:]]))
