"""docs/settings.md has every setting as the code has it.

``python -m tests.unit.project.test_settings_page`` writes its table anew.
"""

import re
from typing import Final

from operator_app.settings import ENV_PREFIX, Settings
from tests.paths import MANIFESTS, ROOT
from tests.unit.project.definitions import documents

PAGE: Final = ROOT / "docs" / "settings.md"
TABLE: Final = re.compile(r"(?<=<!-- settings, written by test_settings_page.py -->\n).*?(?=<!-- /)", re.DOTALL)


def settings_table() -> str:
    """The table of settings, as the class has them."""
    rows = []
    for name, field in Settings.model_fields.items():
        default = "" if field.default in (None, ()) else f"`{field.default}`"
        rows.append(f"| `{ENV_PREFIX}{name.upper()}` | {default} | {field.description} |")
    return "\n".join(["| variable | default | meaning |", "|---|---|---|", *rows]) + "\n"


def test_the_table_is_the_class() -> None:
    """Names, defaults and meanings are those of Settings, all of them and in their order."""
    found = TABLE.search(PAGE.read_text(encoding="utf-8"))
    assert found
    assert found[0] == settings_table(), "python -m tests.unit.project.test_settings_page writes it"


def test_no_setting_is_named_that_does_not_exist() -> None:
    """What a user copies into a Deployment is read, and what the manifests set, too."""
    known = {ENV_PREFIX + name.upper() for name in Settings.model_fields}
    told = "".join(file.read_text(encoding="utf-8") for file in documents())
    shipped = "".join(file.read_text(encoding="utf-8") for file in MANIFESTS.rglob("*.yaml"))
    named = {
        *re.findall(rf"\b{ENV_PREFIX}[A-Z0-9_]+\b", told),
        *re.findall(rf"name: ({ENV_PREFIX}[A-Z0-9_]+)", shipped),
    }
    assert {"OPERATOR_APP_REGISTRY", "OPERATOR_APP_POWERDNS_URL"} < named, "it finds them"
    assert named - known == set()


if __name__ == "__main__":
    PAGE.write_text(TABLE.sub(lambda _: settings_table(), PAGE.read_text(encoding="utf-8")), encoding="utf-8")
