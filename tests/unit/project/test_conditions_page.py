"""docs/conditions.md explains every condition and every reason that the code can give."""

import ast
import re
from typing import Final

from operator_app import status
from tests.paths import ROOT

PAGE: Final = (ROOT / "docs" / "conditions.md").read_text(encoding="utf-8")


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


def test_every_reason_is_explained() -> None:
    """Whatever reason the code can give, a user finds what it means and what to do."""
    explained = set(re.findall(r"`([A-Z]\w+)`", PAGE.partition("## Reasons")[2]))
    assert {"Ready", "NameConflict", "HostnameTaken", "ZoneNotFound", "RemovalAbandoned"} < reasons(), "it finds them"
    assert reasons() - explained == set()


def test_every_condition_is_explained() -> None:
    """The table of conditions has all that the status can show."""
    table = PAGE.partition("## Conditions")[2].partition("\n## ")[0]
    assert set(re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE)) == {
        status.READY,
        status.RECONCILED,
        status.AVAILABLE,
        status.REGISTERED,
        status.PROGRAMMED,
        status.RECONCILING,
        status.STALLED,
        status.CONTENDED,
    }
