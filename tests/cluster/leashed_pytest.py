"""pytest as a child process that ends with its parent: ``python -m tests.cluster.leashed_pytest ARGUMENTS…``.

It imports nothing that pytest wants to import first.
"""

import sys

import pytest

from tests.e2e import leash

if __name__ == "__main__":
    leash.hold()
    sys.exit(pytest.main(sys.argv[1:]))
