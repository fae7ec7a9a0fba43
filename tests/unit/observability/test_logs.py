"""The log: JSON lines or text for people, one level and one form for the operator and the libraries."""

import json
import logging
from collections.abc import Iterator

import pytest
import structlog

from operator_app.observability.logs import configure_logging


@pytest.fixture(autouse=True)
def logging_as_before() -> Iterator[None]:
    """Logging is one for the process."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:], root.level = handlers, level
    structlog.reset_defaults()


def lines(capsys: pytest.CaptureFixture[str]) -> list[str]:
    """What was logged."""
    out, err = capsys.readouterr()
    assert out == ""
    return err.splitlines()


def test_every_event_is_one_json_object_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    """With event, level, logger and time in UTC; an exception and a line end stay within the line."""
    configure_logging("info", "json")
    structlog.get_logger("operator_app.x").info("child", kind="Service", fields=[".spec.x"], note="a\nb")
    try:
        int("broken")
    except ValueError:
        structlog.get_logger("operator_app.x").exception("reconcile_crashed")
    first, second = map(json.loads, lines(capsys))
    assert first.pop("timestamp").endswith("Z")
    assert first == {
        "event": "child",
        "kind": "Service",
        "fields": [".spec.x"],
        "note": "a\nb",
        "level": "info",
        "logger": "operator_app.x",
    }
    assert second["level"] == "error"
    assert "ValueError: invalid literal" in second["exception"]


def test_records_of_libraries_come_out_in_the_same_form(capsys: pytest.CaptureFixture[str]) -> None:
    """A reader of the log needs one parser."""
    configure_logging("info", "json")
    logging.getLogger("some.library").warning("trouble with %s", "it")
    (line,) = map(json.loads, lines(capsys))
    assert (line["event"], line["level"], line["logger"]) == ("trouble with it", "warning", "some.library")


def test_the_level_holds_and_clients_are_quiet(capsys: pytest.CaptureFixture[str]) -> None:
    """Nothing below the level, and no line for each request of an HTTP client."""
    configure_logging("warning", "json")
    structlog.get_logger("operator_app.x").info("quiet")
    configure_logging("debug", "json")
    for name in ("httpx", "httpx2", "httpcore", "httpcore2"):
        logging.getLogger(name).info("GET /")
    assert lines(capsys) == []


def test_console_is_for_people(capsys: pytest.CaptureFixture[str]) -> None:
    """The same event as text, without escape sequences."""
    configure_logging("info", "console")
    structlog.get_logger("operator_app.x").info("child", kind="Service")
    (line,) = lines(capsys)
    assert "child" in line
    assert "kind=Service" in line
    assert "\x1b" not in line
