"""The operator as a child process that ends with its parent: ``python -m tests.e2e.leashed_operator run ...``.

For tests, the demo and ``make dev``, which people may end in any way: no operator that they started may then go on
writing to a cluster.
"""

import sys

from operator_app.__main__ import main
from tests.e2e import leash

if __name__ == "__main__":
    leash.hold()
    sys.exit(main())
