"""The public surface: what fp8bench exports is what its pages document."""

from __future__ import annotations

import ast
import re
import tomllib

from hatchling.metadata.core import ProjectMetadata
from hatchling.plugin.manager import PluginManager

import fp8bench
from tests.house.sources import ROOT

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
CODE = re.compile(r"^ *```.*?^ *```|`[^`\n]+`", re.MULTILINE | re.DOTALL)
ATTRIBUTE = re.compile(r"(?<![\w./-])fp8bench\.([A-Za-z]\w*)")
IMPORTED = re.compile(r"from fp8bench import (\([^)]*\)|[^\n]*)")


def documented() -> set[str]:
    """Names shown in pages as `fp8bench.NAME` or `from fp8bench import NAME`; rooms are not public."""
    names: set[str] = set()
    for page in PAGES:
        for code in CODE.findall(page.read_text()):
            names.update(ATTRIBUTE.findall(code))
            for found in IMPORTED.findall(code):
                names.update(re.findall(r"\w+", found))
    names.discard("yaml")  # fp8bench.yaml is a file that `init` writes
    rooms = {path.stem for path in (ROOT / "fp8bench").iterdir()}
    return {name for name in names if name not in rooms or name in fp8bench.__all__}


def test_all_is_sorted_and_resolves() -> None:
    assert list(fp8bench.__all__) == sorted(set(fp8bench.__all__))
    for name in fp8bench.__all__:
        assert getattr(fp8bench, name) is not None
    assert set(fp8bench.__all__) <= set(dir(fp8bench))


def test_all_is_what_the_pages_document() -> None:
    exported = set(fp8bench.__all__) - {"__version__"}
    assert exported - documented() == set(), "exported, not documented"
    assert documented() - exported == set(), "documented, not exported"


def test_the_version_has_one_source() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert "version" in project["project"]["dynamic"]
    assert project["tool"]["hatch"]["version"]["path"] == "fp8bench/__init__.py"
    assert ProjectMetadata(str(ROOT), PluginManager()).version == fp8bench.__version__
    assignments = [
        ast.literal_eval(node.value)
        for node in ast.parse((ROOT / "fp8bench" / "__init__.py").read_text()).body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__version__"
    ]
    assert assignments == [fp8bench.__version__]
