"""The README says what the code says: settings, metrics, reasons, and the tests that prove its promises.

``python -m tests.unit.project.test_readme`` writes the table of settings anew.
"""

import ast
import re
from typing import Final

import pytest
from prometheus_client import Counter
from prometheus_client.metrics import MetricWrapperBase

from operator_app import status
from operator_app.observability.metrics import Metrics
from operator_app.settings import ENV_PREFIX, Settings
from tests.paths import ROOT

README: Final = (ROOT / "README.md").read_text(encoding="utf-8")
SETTINGS: Final = re.compile(r"(?<=<!-- settings, written by test_readme.py -->\n).*?(?=<!-- /)", re.DOTALL)


def settings_table() -> str:
    """The table of settings, as the class has them."""
    rows = []
    for name, field in Settings.model_fields.items():
        default = "" if field.default in (None, ()) else f"`{field.default}`"
        rows.append(f"| `{ENV_PREFIX}{name.upper()}` | {default} | {field.description} |")
    return "\n".join(["| variable | default | meaning |", "|---|---|---|", *rows]) + "\n"


def metrics() -> dict[str, list[str]]:
    """The labels of every metric, by the name under which it is queried."""
    collectors = [each for each in vars(Metrics()).values() if isinstance(each, MetricWrapperBase)]
    return {each._name + "_total" * isinstance(each, Counter): list(each._labelnames) for each in collectors}


def parameters(definition: ast.AST, classes: dict[str, ast.ClassDef]) -> list[str]:
    """What a call of a function or class takes, in order: of a class its ``__init__``, its fields, or its base's."""
    if isinstance(definition, ast.FunctionDef | ast.AsyncFunctionDef):
        arguments = (*definition.args.args, *definition.args.kwonlyargs)
        return [each.arg for each in arguments if each.arg != "self"]
    if not isinstance(definition, ast.ClassDef):
        return []
    for member in definition.body:
        if isinstance(member, ast.FunctionDef) and member.name == "__init__":
            return parameters(member, classes)
    fields = [
        each.target.id
        for each in definition.body
        if isinstance(each, ast.AnnAssign) and isinstance(each.target, ast.Name)
    ]
    bases = [classes[each.id] for each in definition.bases if isinstance(each, ast.Name) and each.id in classes]
    return fields or [name for base in bases for name in parameters(base, classes)]


def reasons() -> set[str]:
    """Every reason that the code gives by name, in a condition or an Event: each ``reason`` that a call takes.

    Reasons that the API server gives are passed on as they come and are not among them.
    """
    nodes = [
        node
        for file in (ROOT / "operator_app").rglob("*.py")
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8")))
    ]
    constants = {
        node.target.id: node.value
        for node in nodes
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
    }
    classes = {node.name: node for node in nodes if isinstance(node, ast.ClassDef)}
    takers = {}
    for node in nodes:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            taken = parameters(node, classes)
            if "reason" in taken:
                takers[node.name] = taken.index("reason")
    found = set()
    for node in nodes:
        if not isinstance(node, ast.Call):
            continue
        name = node.func.id if isinstance(node.func, ast.Name) else getattr(node.func, "attr", "")
        if name not in takers:
            continue
        by_keyword = [keyword.value for keyword in node.keywords if keyword.arg == "reason"]
        for given in by_keyword or node.args[takers[name] :][:1]:
            value = constants.get(given.id) if isinstance(given, ast.Name) else given
            if isinstance(value, ast.Constant) and isinstance(value.value, str):
                found.add(value.value)
    return found


def test_the_settings_table_is_the_class() -> None:
    """Names, defaults and meanings are those of Settings, all of them and in their order."""
    found = SETTINGS.search(README)
    assert found
    assert found[0] == settings_table(), "python -m tests.unit.project.test_readme writes it"


def test_every_metric_is_listed_and_no_other() -> None:
    """Names and labels in the table of metrics are those that are exported."""
    rows = re.findall(r"^\| `(operator_app_\w+)` \| (.*?) ?\|", README, re.MULTILINE)
    assert {name: re.findall(r"\w+", labels) for name, labels in rows} == metrics()


def test_no_metric_is_named_that_is_not_exported() -> None:
    """What a user copies into an alert matches something."""
    assert set(re.findall(r"\boperator_app_\w+", README)) == set(metrics())


def test_every_reason_is_explained() -> None:
    """Whatever reason the code can give, a user finds what it means and what to do."""
    table = README.partition("### Reasons")[2].partition("\n## ")[0]
    explained = set(re.findall(r"`([A-Z]\w+)`", table))
    assert {"Ready", "NameConflict", "HostnameTaken", "ZoneNotFound", "RemovalAbandoned"} < reasons(), "it finds them"
    assert reasons() - explained == set()


def test_every_condition_is_explained() -> None:
    """The table of conditions has all that the status can show."""
    table = README.partition("## Conditions")[2].partition("###")[0]
    assert set(re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE)) == {
        status.READY,
        status.RECONCILED,
        status.AVAILABLE,
        status.REGISTERED,
        status.RECONCILING,
        status.STALLED,
        status.CONTENDED,
    }


def test_every_promise_names_a_test_that_exists() -> None:
    """A promise without a test is none."""
    sources = [file.read_text(encoding="utf-8") for file in (ROOT / "tests").rglob("test_*.py")]
    defined = {name for source in sources for name in re.findall(r"^(?:async )?def (test_\w+)\(", source, re.MULTILINE)}
    rows = README.partition("## What it promises")[2].partition("\n## ")[0].splitlines()
    promises = [row for row in rows if row.startswith("| ")][1:]
    assert promises
    for row in promises:
        named = re.findall(r"`(test_\w+)`", row)
        assert named, row
        assert set(named) <= defined, row


@pytest.mark.parametrize("document", ["README.md", "CONTRIBUTING.md", "docs/adr/README.md"])
def test_links_lead_somewhere(document: str) -> None:
    """A relative link in a document names a file that is there."""
    file = ROOT / document
    links = re.findall(r"\]\((?!https?:)([^)#]+)", file.read_text(encoding="utf-8"))
    assert [link for link in links if not (file.parent / link).exists()] == []


def test_every_decision_is_in_the_index() -> None:
    """The index of decisions has each record under its own number and title."""
    directory = ROOT / "docs" / "adr"
    titles = {
        file.name: file.read_text(encoding="utf-8").splitlines()[0] for file in sorted(directory.glob("[0-9]*.md"))
    }
    rows = re.findall(
        r"^\| \[(\d+)\]\((.+?)\) \| (.+) \|$", (directory / "README.md").read_text(encoding="utf-8"), re.MULTILINE
    )
    assert {name: f"# {number}. {title}" for number, name, title in rows} == titles


def test_every_make_command_exists() -> None:
    """A `make` command that a document tells people to type is a target of the Makefile."""
    targets = set(re.findall(r"^([a-z0-9-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    for document in ("README.md", "CONTRIBUTING.md"):
        text = (ROOT / document).read_text(encoding="utf-8")
        named = set(re.findall(r"(?:^|`)make ([a-z0-9-]+)", text, re.MULTILINE))
        assert named, document
        assert named <= targets, document


if __name__ == "__main__":
    (ROOT / "README.md").write_text(SETTINGS.sub(lambda _: settings_table(), README), encoding="utf-8")
