"""Where things of this repository are, for tests in any folder."""

from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parents[1]
"""The working tree."""

MANIFESTS: Final = ROOT / "manifests"
