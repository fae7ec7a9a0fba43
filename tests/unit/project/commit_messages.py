"""Commit messages: what ``make check`` asks of each new one, and which commits count as new.

``python -m tests.unit.project.commit_messages`` checks the commits after ``BASE``. Exit code 0 when all of them
hold, or when there is no history to check (no git, a shallow clone, an unpacked archive), which it then says; else 1.

:func:`complaints` is pure; :func:`new_messages` runs git and reads nothing else.
"""

import re
import subprocess
import sys
from pathlib import Path
from typing import Final

from tests.paths import ROOT

BASE: Final = "cd5c6bc0796d631313d180bbdebbb09973f84c69"
"""The last commit of before these rules."""

SUBJECT_LENGTH: Final = 72

_TRAILER: Final = re.compile(
    r"(?:[A-Z][a-z]+(?:-[A-Za-z]+)+|Closes|Fixes|Refs): \S|\(cherry picked from commit [0-9a-f]+\)"
)
# fmt: off
_NO_VERBS: Final = frozenset({
    "a", "all", "an", "and", "another", "any", "both", "but", "each", "every", "for", "from", "here", "how", "i",
    "if", "in", "it", "its", "many", "more", "my", "new", "no", "not", "nothing", "of", "on", "one", "our", "some",
    "that", "the", "their", "there", "these", "this", "those", "to", "two", "we", "what", "when", "where", "which",
    "who", "with", "without",
})
# fmt: on
_INFLECTED: Final = re.compile(r"[a-z]+(?:ing|ed|[^aious]s)")
_VERBS: Final = frozenset(
    {"bleed", "bring", "embed", "exceed", "feed", "need", "ping", "proceed", "seed", "shed", "speed"}
)
"""Imperatives that look inflected."""


def complaints(message: str) -> list[str]:
    """What is wrong with a commit message, one sentence each; empty when nothing is."""
    lines = message.strip("\n").splitlines() or [""]
    subject, rest = lines[0], lines[1:]
    first = re.split(r"[\s:,;]", subject, maxsplit=1)[0]
    found = []
    if len(subject) > SUBJECT_LENGTH:
        found.append(f"the subject has {len(subject)} characters; {SUBJECT_LENGTH} are allowed")
    if subject.endswith("."):
        found.append("the subject ends in a period")
    if not subject[:1].isupper():
        found.append("the subject does not begin with a capital letter")
    word = first.lower()
    if word in _NO_VERBS or (_INFLECTED.fullmatch(word) and word not in _VERBS):
        found.append(f"the subject begins with {first!r}; write an imperative, such as Add, Fix or Move")
    if rest and rest[0].strip():
        found.append("the line after the subject is not blank")
    if not any(line.strip() and not _TRAILER.match(line) for line in rest):
        found.append("there is no body; say why the change is made")
    return found


def new_messages(root: Path, base: str) -> dict[str, str] | None:
    """The messages of all commits of ``root`` after ``base`` but merges, by abbreviated hash, oldest first.

    ``None`` where the history does not reach back to ``base``, or there is none.
    """
    if _git(root, "merge-base", "--is-ancestor", base, "HEAD") is None:
        return None
    listed = _git(root, "log", "--no-merges", "--reverse", "-z", "--format=%h%n%B", f"{base}..HEAD")
    if listed is None:
        return None
    entries = (entry.partition("\n") for entry in listed.split("\0") if entry)
    return {name: message for name, _, message in entries}


def _git(root: Path, *arguments: str) -> str | None:
    """What git prints, or ``None`` where it refuses or is not installed."""
    try:
        done = subprocess.run(("git", *arguments), cwd=root, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        return None
    return done.stdout if done.returncode == 0 else None


def main(root: Path = ROOT, base: str = BASE) -> int:
    """Print what is wrong with new commits, or that there is nothing to check; returns the exit code."""
    messages = new_messages(root, base)
    if messages is None:
        print(f"commit messages are not checked: no git history here that reaches back to {base[:7]}")
        return 0
    bad = {name: found for name, message in messages.items() if (found := complaints(message))}
    for name, found in bad.items():
        print(f"{name} {messages[name].strip().partition(chr(10))[0]}")
        for complaint in found:
            print(f"  {complaint}")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
