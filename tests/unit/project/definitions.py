"""What the repository holds, as the documents name it: files, packages, test functions. Reads the working tree only."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from tests.paths import ROOT

_LEFT_OUT: Final = frozenset({".git", ".venv", "__pycache__", "build", "dist"})


def files(directory: Path = ROOT) -> Iterator[Path]:
    """All files below a directory, but those of tools and of git."""
    for path in sorted(directory.iterdir()):
        if path.name in _LEFT_OUT or path.name.endswith("_cache"):
            continue
        if path.is_dir():
            yield from files(path)
        else:
            yield path


def documents() -> list[Path]:
    """Every page that people read."""
    return [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").rglob("*.md"))]


def packages() -> set[str]:
    """The packages of the operator, as paths from the root."""
    return {str(file.parent.relative_to(ROOT)) for file in (ROOT / "operator_app").glob("*/__init__.py")}


def top_modules() -> set[str]:
    """The modules directly in ``operator_app``, as paths from the root."""
    modules = (file for file in (ROOT / "operator_app").glob("*.py") if file.name != "__init__.py")
    return {str(file.relative_to(ROOT)) for file in modules}


def defined_tests() -> dict[str, list[Path]]:
    """Where each test function is defined, as paths from the root; a name may stand in several files."""
    found: dict[str, list[Path]] = {}
    for file in sorted((ROOT / "tests").rglob("test_*.py")):
        source = file.read_text(encoding="utf-8")
        for name in re.findall(r"^ *(?:async )?def (test_\w+)\(", source, re.MULTILINE):
            found.setdefault(name, []).append(file.relative_to(ROOT))
    return found
