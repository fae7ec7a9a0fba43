"""Commit messages are checked by `make check`: what is refused, and which commits are looked at."""

import subprocess
from pathlib import Path
from typing import Final

import pytest

from tests.unit.project.commit_messages import BASE, complaints, main, new_messages

BODY: Final = "It is needed because somebody asked for it.\n"
GIT: Final = ("git", "-c", "user.name=Somebody", "-c", "user.email=somebody@example.org", "-c", "commit.gpgsign=false")


def git(root: Path, *arguments: str) -> str:
    """Run git in ``root``, as somebody, and return what it prints."""
    done = subprocess.run((*GIT, *arguments), cwd=root, capture_output=True, text=True, check=True)
    return done.stdout.strip()


def commit(root: Path, message: str) -> str:
    """An empty commit; returns its hash."""
    git(root, "commit", "--quiet", "--allow-empty", "-m", message)
    return git(root, "rev-parse", "HEAD")


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """A repository with a history: an old commit in the old style."""
    root = tmp_path / "repository"
    root.mkdir()
    git(root, "init", "--quiet", "--initial-branch=main")
    commit(root, "one that nobody would take today.")
    return root


@pytest.mark.parametrize(
    "message",
    [
        f"Add a field\n\n{BODY}",
        f"{'Move' + ' x' * 34}\n\n{BODY}",
        f"Address what the review found\n\n{BODY}",
        f"Bring the children up at the same time\n\n{BODY}\nSigned-off-by: Somebody <somebody@example.org>\n",
        f"Embed the CRDs\n\n{BODY}",
        f"Pass the UID on\n\n{BODY}",
    ],
)
def test_a_good_message_is_accepted(message: str) -> None:
    """An imperative of at most 72 characters, a blank line, and a body."""
    assert complaints(message) == []


@pytest.mark.parametrize(
    ("message", "complaint"),
    [
        (f"{'Move' + ' x' * 34}y\n\n{BODY}", "has 73 characters"),
        (f"Add a field.\n\n{BODY}", "ends in a period"),
        (f"add a field\n\n{BODY}", "capital letter"),
        (f"Added a field\n\n{BODY}", "imperative"),
        (f"Adds a field\n\n{BODY}", "imperative"),
        (f"Adding a field\n\n{BODY}", "imperative"),
        (f"The field is there\n\n{BODY}", "imperative"),
        (f"One scripted client for all\n\n{BODY}", "imperative"),
        ("Add a field", "no body"),
        ("Add a field\n\nSigned-off-by: Somebody <somebody@example.org>\n", "no body"),
        (f"Add a field\n{BODY}", "not blank"),
        ("", "capital letter"),
    ],
)
def test_a_bad_message_is_refused_for_its_reason(message: str, complaint: str) -> None:
    """Each rule finds what it is for and says so."""
    assert [each for each in complaints(message) if complaint in each]


def test_only_commits_after_the_base_are_looked_at(repository: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The old commit passes, a new one of the same style does not, and the output names it."""
    base = git(repository, "rev-parse", "HEAD")
    commit(repository, f"Add a field\n\n{BODY}")
    assert main(repository, base) == 0
    bad = commit(repository, "fields.")
    assert main(repository, base) == 1
    told = capsys.readouterr().out
    assert bad[:7] in told
    assert "ends in a period" in told


def test_merges_are_skipped(repository: Path) -> None:
    """What git writes over a merge is nobody's prose; the commits that it brings in are checked."""
    base = git(repository, "rev-parse", "HEAD")
    git(repository, "checkout", "--quiet", "-b", "topic")
    commit(repository, f"Add a field\n\n{BODY}")
    git(repository, "checkout", "--quiet", "main")
    git(repository, "merge", "--quiet", "--no-ff", "--no-edit", "topic")
    messages = new_messages(repository, base)
    assert messages is not None
    assert [message.partition("\n")[0] for message in messages.values()] == ["Add a field"]
    assert main(repository, base) == 0


def test_a_shallow_clone_passes_and_says_so(
    repository: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Where the base was not fetched there is nothing to compare with."""
    base = git(repository, "rev-parse", "HEAD")
    commit(repository, "fields.")
    git(tmp_path, "clone", "--quiet", "--depth=1", repository.as_uri(), "shallow")
    assert main(tmp_path / "shallow", base) == 0
    assert "not checked" in capsys.readouterr().out


def test_an_archive_passes_and_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A directory that is no git checkout has no messages."""
    assert main(tmp_path) == 0
    assert f"reaches back to {BASE[:7]}" in capsys.readouterr().out


def test_a_machine_without_git_passes(
    repository: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A missing git is no defect of the commits."""
    monkeypatch.setenv("PATH", "")
    assert main(repository, BASE) == 0
    assert "not checked" in capsys.readouterr().out
