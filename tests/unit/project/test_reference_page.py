"""docs/reference.md has every field of an EnvoyProxy as the models have it.

``python -m tests.unit.project.test_reference_page`` writes it anew.
"""

import re
from collections.abc import Iterator
from typing import Final

from operator_app.api.crd import crds
from operator_app.api.kinds import ENVOY_PROXY, Object
from tests.paths import ROOT

PAGE: Final = ROOT / "docs" / "reference.md"
SCHEMA: Final[Object] = crds()[0]["spec"]["versions"][0]["schema"]["openAPIV3Schema"]

HEAD: Final = f"""# Fields of an EnvoyProxy

Written from the models by `python -m tests.unit.project.test_reference_page`; a test holds it to them. `kubectl explain
envoyproxies.spec --api-version={ENVOY_PROXY.api_version}` says the same. How fields work together is in
[the guide](guide.md).

Bold fields have to be there. What is optional can be left out; the last column says what counts then, where that is not
plain. `[]` stands for each item of a list. Below each
table are the rules; what breaks one is refused with that sentence.
"""


def bounds(schema: Object, least: str, most: str) -> str:
    """Two bounds of a schema as a text that begins with a blank, or nothing."""
    if most not in schema:
        return ""
    return f" {schema[least]} to {schema[most]}" if least in schema else f" up to {schema[most]}"


def type_of(schema: Object) -> str:
    """What a field may be, in a few words."""
    if "enum" in schema:
        return ", ".join(f"`{each}`" for each in schema["enum"])
    words = {
        "array": f"list of{bounds(schema, 'minItems', 'maxItems')} {_items(schema)}",
        "object": "object"
        if "properties" in schema
        else f"map of{bounds(schema, 'minProperties', 'maxProperties')} texts",
        "integer": f"integer{bounds(schema, 'minimum', 'maximum')}",
        "string": "text" + (f" of up to {schema['maxLength']}" if "maxLength" in schema else ""),
        None: "integer or text",
    }
    kind = schema.get("type")
    return words.get(kind, str(kind))


def _items(schema: Object) -> str:
    items = schema.get("items", {})
    if "properties" in items:
        return "objects"
    return type_of(items) if "enum" in items else "texts"


def objects(schema: Object, path: str) -> Iterator[tuple[str, Object]]:
    """``schema`` and every object below it with its path, parents first."""
    yield path, schema
    for name, inner in schema["properties"].items():
        if "properties" in inner:
            yield from objects(inner, f"{path}.{name}")
        elif "properties" in inner.get("items", {}):
            yield from objects(inner["items"], f"{path}.{name}[]")


def anchor(path: str) -> str:
    """The fragment by which a heading is linked to."""
    return re.sub(r"[^\w -]", "", path.lower())


def cell(text: str) -> str:
    """``text`` for a cell of a table."""
    return text.replace("|", "\\|").replace("<", "&lt;").replace("*", "\\*")


def section(path: str, schema: Object) -> Iterator[str]:
    """The lines about one object: what it is, its fields, its rules."""
    yield from (f"## {path}", "")
    if schema.get("description"):
        yield from (cell(schema["description"]), "")
    yield from ("| field | type | meaning |", "|---|---|---|")
    for name, inner in schema["properties"].items():
        label = f"**`{name}`**" if name in schema.get("required", ()) else f"`{name}`"
        below = f"{path}.{name}" if "properties" in inner else f"{path}.{name}[]"
        has_section = "properties" in inner or "properties" in inner.get("items", {})
        kind = f"[{type_of(inner)}](#{anchor(below)})" if has_section else type_of(inner)
        default = inner.get("default")
        told = (
            f" Default: `{str(default).lower() if isinstance(default, bool) else default}`."
            if _is_plain(default)
            else ""
        )
        yield f"| {label} | {kind} | {cell(inner.get('description', ''))}{told} |"
    yield ""
    rules = [each["message"] for each in schema.get("x-kubernetes-validations", ())]
    for name, inner in schema["properties"].items():
        checked = [*inner.get("x-kubernetes-validations", ())] if "properties" not in inner else []
        checked += inner["items"].get("x-kubernetes-validations", ()) if _is_plain_list(inner) else []
        rules += [f"`{name}` {each['message']}" for each in checked]
    if rules:
        yield from (*(f"- {cell(each)}" for each in rules), "")


def _is_plain(default: object) -> bool:
    return isinstance(default, str | int | bool)


def _is_plain_list(schema: Object) -> bool:
    return "items" in schema and "properties" not in schema["items"]


def page() -> str:
    """The whole page."""
    lines = [HEAD]
    for member in ("spec", "status"):
        for path, schema in objects(SCHEMA["properties"][member], member):
            lines += section(path, schema)
    return "\n".join(lines).rstrip("\n") + "\n"


def test_the_page_is_the_models() -> None:
    """Fields, types, bounds, defaults, meanings and rules are those of the schema, all of them."""
    assert PAGE.read_text(encoding="utf-8") == page(), "python -m tests.unit.project.test_reference_page writes it"


def test_every_field_has_a_row() -> None:
    """Each property of the schema stands in the section of its object, and is told in words."""
    text = PAGE.read_text(encoding="utf-8")
    for member in ("spec", "status"):
        for path, schema in objects(SCHEMA["properties"][member], member):
            below = text.partition(f"\n## {path}\n")[2].partition("\n## ")[0]
            for name in schema["properties"]:
                (row,) = re.findall(rf"^\| (?:\*\*)?`{name}`(?:\*\*)? \| .+ \| (.*) \|$", below, re.MULTILINE)
                assert len(row.split()) >= 2, f"{path}.{name}"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
