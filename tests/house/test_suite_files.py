"""Every workload of fp8bench's own has a file in suites/, so that asv follows it, and no file is without one."""

from __future__ import annotations

import ast
from pathlib import Path

from fp8bench.registry import workloads
from fp8bench.store.series import class_name
from tests.counts import for_each

SUITES = Path(__file__).resolve().parents[2] / "suites"
FILE = '''"""The suite {name} as benchmarks for asv."""

from fp8bench import asv_bridge


class {title}(asv_bridge.Suite):
    """The declared grid of the suite {name}; see Grid in fp8bench/workloads/{name}.py."""

    workload = "{name}"
'''


def built_in() -> set[str]:
    """The tracked workloads of this package, and all public ones; a test may have registered others."""
    own = {name: workloads.get(name) for name in workloads.names(hidden=True)}
    return {
        name
        for name, one in own.items()
        if type(one).__module__.startswith("fp8bench.workloads.") and (one.history or name in workloads.names())
    }


def test_every_workload_has_a_grid_and_a_suite_file_and_vice_versa() -> None:
    assert {name for name in built_in() if workloads.get(name).history is None} == set()
    assert {path.stem for path in SUITES.glob("*.py") if "asv_bridge.Suite" in path.read_text()} == built_in()


@for_each("name", sorted(built_in()))
def test_suite_files_differ_in_their_names_only(name: str) -> None:
    assert (SUITES / f"{name}.py").read_text() == FILE.format(name=name, title=class_name(name))


@for_each("path", sorted(SUITES.glob("*.py")), ids=lambda path: path.stem)
def test_nothing_in_a_suite_file_is_taken_for_a_hook(path: Path) -> None:
    """asv calls every 'setup' or 'teardown' in a module, including classes and capitals."""
    names = {node.name for node in ast.parse(path.read_text()).body if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    assert not {name for name in names if name.lower() in ("setup", "teardown")}
