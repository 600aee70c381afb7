"""Who may import whom. The table below is the house's plan; the tests hold every module of fp8bench against it."""

from __future__ import annotations

import ast
import graphlib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[2] / "fp8bench"

FLOOR = frozenset({"codec", "errors", "model", "stats", "throttling", "units"})
ANYONE = frozenset({"*"})
LEAF = FLOOR | {"axes", "formats", "nn", "numerics", "protocols", "registry"}

# Room -> the rooms it may import; a room is a module or package directly under fp8bench. Modules of a room may import
# each other, except leaves (LEAVES): workloads, precisions and devices never lean on their neighbours.
TABLE: dict[str, frozenset[str]] = {
    "codec": FLOOR,
    "errors": FLOOR,
    "model": FLOOR,
    "stats": FLOOR,
    "throttling": FLOOR,
    "units": FLOOR,
    "corpus": FLOOR,
    "axes": FLOOR,
    "formats": FLOOR,
    "protocols": FLOOR | {"axes"},
    "history": FLOOR,
    "analysis": FLOOR,
    "numerics": FLOOR | {"formats"},
    "registry": FLOOR | {"protocols"},
    "answers": FLOOR | {"protocols", "registry"},
    "layering": FLOOR | {"answers", "protocols", "registry"},
    "plan": FLOOR | {"answers", "axes", "layering", "protocols", "registry"},
    "identity": FLOOR,
    "environment": FLOOR | {"identity", "protocols", "registry"},
    "followed": FLOOR | {"answers", "axes", "protocols", "registry"},
    "points": FLOOR | {"analysis", "followed", "measure", "protocols", "registry"},
    "view": FLOOR | {"history", "identity", "points"},
    "circumstances": FLOOR | {"samplers"},
    "commits": FLOOR,
    "choosing": FLOOR | {"commits", "history", "telling"},
    "comparing": FLOOR | {"analysis", "report"},
    "telling": FLOOR | {"history", "view"},
    "course": FLOOR | {"history", "identity", "points", "telling", "view"},
    "rebuilding": FLOOR | {"history", "index", "telling", "view"},
    "renaming": FLOOR | {"history", "identity"},
    "joining": FLOOR | {"history", "rebuilding", "renaming", "telling", "view"},
    "index": FLOOR | {"analysis", "course", "followed", "history", "identity", "telling"},
    "verifying": FLOOR | {"commits", "history", "identity", "telling", "view"},
    "regressions": FLOOR | {"analysis", "followed", "history", "identity", "index", "report"},
    "stores": FLOOR | {"arguments", "history", "index", "streams"},
    "reporting": ANYONE,
    "report_commands": ANYONE,
    "report_past": FLOOR | {"course", "followed", "identity", "index", "report", "view"},
    "resuming": FLOOR,
    "paths": FLOOR,
    "profiler": FLOOR,
    "exporting": FLOOR | {"analysis", "paths"},
    "interrupts": FLOOR,
    "streams": FLOOR,
    "samplers": FLOOR,
    "measure": FLOOR | {"formats", "paths", "profiler", "protocols", "registry", "samplers"},
    "report": FLOOR | {"analysis", "protocols", "registry"},
    "nn": FLOOR | {"axes", "formats", "numerics", "protocols"},
    "precisions": LEAF,
    "devices": LEAF | {"profiler"},
    "workloads": LEAF,
    "pipeline": ANYONE,
    "api": ANYONE,
    "asv_bridge": ANYONE,
    "asv_measuring": ANYONE,
    "frames": ANYONE,
    "history_commands": ANYONE,
    "regression_commands": ANYONE,
    "compare_commands": ANYONE,
    "gating": FLOOR | {"comparing", "plain_yaml", "report"},
    "gate_sources": ANYONE,
    "gate_commands": ANYONE,
    "duel_commands": ANYONE,
    "dueling": FLOOR
    | {
        "analysis",
        "commits",
        "comparing",
        "history",
        "interrupts",
        "measure",
        "plan",
        "protocols",
        "registry",
        "report",
    },
    "lint_commands": ANYONE,
    "sensitivity": FLOOR | {"answers", "measure", "plan", "protocols", "registry", "report"},
    "sensitivity_commands": ANYONE,
    "linting": FLOOR | {"formats", "nn", "protocols", "registry", "report"},
    "argument_types": FLOOR,
    "history_arguments": FLOOR | {"argument_types"},
    "arguments": FLOOR | {"argument_types", "history_arguments"},
    "training_keys": FLOOR | {"registry"},
    "plain_yaml": FLOOR,
    "config": FLOOR | {"plain_yaml", "training_keys"},
    "cli": ANYONE,
    "outputs": ANYONE,
    "export_commands": ANYONE,
    "doctor": ANYONE,
    "selftest": ANYONE,
    "__init__": ANYONE,
    "__main__": ANYONE,
}
LEAVES = frozenset({"precisions", "devices", "workloads"})
OUTSIDE = frozenset({"suites", "reports", "tests"})

HEAVY = frozenset({"torch", "numpy", "pandas", "matplotlib", "jinja2", "rich", "yaml"})
# Importable inside a function: what is heavy, and what a machine may lack.
LAZY = HEAVY | {"pynvml", "ctypes", "tensorboard", "wandb"}
# Where a module may import heavy packages at its top: the first prefix that fits counts.
HEAVY_TOPS: tuple[tuple[str, frozenset[str]], ...] = (
    ("fp8bench.stats", frozenset({"numpy"})),
    ("fp8bench.plain_yaml", frozenset({"yaml"})),
    ("fp8bench.gating.rules_file", frozenset({"yaml"})),
    ("fp8bench.config", frozenset({"yaml"})),
    ("fp8bench.index.", frozenset({"numpy"})),
    ("fp8bench.analysis.", HEAVY - {"torch"}),
    ("fp8bench.formats.device_classes", frozenset()),
    ("fp8bench.formats.grids", frozenset()),
    ("fp8bench.formats.hardware", frozenset()),
    ("fp8bench.formats.product_rules", frozenset()),
    ("fp8bench.formats.scalings", frozenset()),
    ("fp8bench.formats.recipes", frozenset()),
    ("fp8bench.formats.scaled_products", frozenset()),
    ("fp8bench.formats.te_rules", frozenset()),
    ("fp8bench.formats.", frozenset({"numpy", "torch"})),
    ("fp8bench.numerics.", frozenset({"numpy", "torch"})),
    ("fp8bench.nn.attention_kernels", frozenset()),
    ("fp8bench.nn.layer_sizes", frozenset()),
    ("fp8bench.nn.sizes", frozenset()),
    ("fp8bench.nn.recipe_precision", frozenset()),
    ("fp8bench.nn.", frozenset({"numpy", "torch"})),
    ("fp8bench.report.drawing.", frozenset({"matplotlib"})),
)
# Module -> what else it may import inside a function. The reason stands beside it.
LAZY_ALLOWED: dict[str, frozenset[str]] = {
    # The namespace of the package holds public names only.
    "fp8bench": frozenset({"importlib"}),
    # It brings OpenSSL along, for user modules and long names only: --help does without.
    "fp8bench.registry": frozenset({"hashlib"}),
    "fp8bench.identity": frozenset({"hashlib"}),
    "fp8bench.paths": frozenset({"hashlib"}),
    # An interrupt may strike while the door is being imported.
    "fp8bench.__main__": frozenset({"fp8bench.cli"}),
    # A command imports what it needs: help and bad usage start no workers, read no history, show no progress.
    "fp8bench.cli": frozenset(
        {
            "fp8bench.config",
            "fp8bench.doctor",
            "fp8bench.dueling.keeping",
            "fp8bench.history.runs",
            "fp8bench.lint_commands",
            "fp8bench.sensitivity_commands",
            "fp8bench.report.progress",
        }
    ),
}


@dataclass(frozen=True)
class Import:
    """One import: `where` is 'top', 'function' or 'typing' (under TYPE_CHECKING)."""

    importer: str
    target: str
    where: str
    line: int

    def __str__(self) -> str:
        return f"{self.importer}:{self.line} imports {self.target} ({self.where})"


def name_of(path: Path) -> str:
    """The dotted name of a module's file."""
    parts = ["fp8bench", *path.relative_to(PACKAGE).with_suffix("").parts]
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {name_of(path): path for path in sorted(PACKAGE.rglob("*.py"))}


def room_of(module: str) -> str:
    """The room a module of fp8bench lies in; the package itself is the room `__init__`."""
    return module.split(".")[1] if "." in module else "__init__"


def ours(target: str) -> bool:
    """Whether an import's target is fp8bench's own."""
    return target.split(".")[0] == "fp8bench"


def targets(node: ast.Import | ast.ImportFrom) -> Iterator[str]:
    """The modules a statement imports. The version is a constant, which anyone may have."""
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
        return
    assert node.level == 0, "imports are absolute"
    base = node.module or ""
    names = [f"{base}.{alias.name}" for alias in node.names if (base, alias.name) != ("fp8bench", "__version__")]
    yield from dict.fromkeys(name if name in MODULES else base for name in names)


def scan(node: ast.AST, importer: str, where: str) -> Iterator[Import]:
    """Every import below a node."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import | ast.ImportFrom):
            yield from (Import(importer, target, where, child.lineno) for target in targets(child))
        elif isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            yield from scan(child, importer, "function")
        elif isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
            for inner in child.body:
                yield from scan(ast.Module([inner], []), importer, "typing")
            for inner in child.orelse:
                yield from scan(ast.Module([inner], []), importer, where)
        else:
            yield from scan(child, importer, where)


@cache
def imports_of(module: str) -> tuple[Import, ...]:
    """Every import of one module of fp8bench."""
    return tuple(scan(ast.parse(MODULES[module].read_text()), module, "top"))


def all_imports() -> list[Import]:
    """Every import in fp8bench."""
    return [found for module in MODULES for found in imports_of(module)]


def heavy_modules() -> frozenset[str]:
    """The modules of fp8bench whose import brings a heavy package along, directly or through others."""
    heavy: set[str] = set()
    while True:
        more = {
            found.importer
            for found in all_imports()
            if found.where == "top" and (found.target.split(".")[0] in HEAVY or found.target in heavy)
        }
        if more <= heavy:
            return frozenset(heavy)
        heavy |= more


def listed(found: list[Import]) -> str:
    """Imports as lines, for an assertion's message."""
    return "\n" + "\n".join(str(one) for one in found)


def test_the_table_has_every_room_and_no_other() -> None:
    """A new room gets its line here on the day it is built; a line without a room is a promise nobody keeps."""
    assert set(TABLE) == {room_of(module) for module in MODULES}


def test_rooms_import_what_the_table_allows() -> None:
    """Imports inside functions and under TYPE_CHECKING count like all others."""
    wrong = []
    for found in all_imports():
        if not ours(found.target):
            continue
        room, target = room_of(found.importer), room_of(found.target)
        if target != room and TABLE[room] != ANYONE and target not in TABLE[room]:
            wrong.append(found)
    assert not wrong, listed(wrong)


def test_leaves_never_import_each_other() -> None:
    """Nor their neighbours in the same package: what two leaves share moves down to nn, formats or numerics."""
    wrong = [
        found
        for found in all_imports()
        if room_of(found.importer) in LEAVES and ours(found.target) and room_of(found.target) in LEAVES
    ]
    assert not wrong, listed(wrong)


@pytest.mark.parametrize("level", ["rooms", "modules"])
def test_no_cycles(level: str) -> None:
    """Neither between rooms nor between modules, whatever the kind of import."""
    graph: dict[str, set[str]] = {}
    for found in all_imports():
        if not ours(found.target):
            continue
        here, there = found.importer, found.target
        if level == "rooms":
            here, there = room_of(here), room_of(there)
        if here != there:
            graph.setdefault(here, set()).add(there)
    graphlib.TopologicalSorter(graph).prepare()


def test_fp8bench_never_imports_what_surrounds_it() -> None:
    """suites, reports and tests use fp8bench, never the other way round."""
    wrong = [found for found in all_imports() if found.target.split(".")[0] in OUTSIDE]
    assert not wrong, listed(wrong)


def test_imports_inside_functions_are_heavy_or_optional() -> None:
    """A light module is imported at the top, where a reader looks for it."""
    heavy = heavy_modules()
    wrong = [
        found
        for found in all_imports()
        if found.where == "function"
        and found.target.split(".")[0] not in LAZY
        and found.target not in heavy
        and found.target not in LAZY_ALLOWED.get(found.importer, frozenset())
    ]
    assert not wrong, listed(wrong)


def test_the_allow_list_is_needed() -> None:
    """An entry of LAZY_ALLOWED that nobody uses any more goes."""
    used = {(found.importer, found.target) for found in all_imports() if found.where == "function"}
    unused = {(module, target) for module, extra in LAZY_ALLOWED.items() for target in extra} - used
    assert not unused


def test_heavy_packages_at_the_top_only_where_they_are_the_matter() -> None:
    """Elsewhere they are imported on first use, so that the parent process starts light."""
    wrong = []
    for found in all_imports():
        package = found.target.split(".")[0]
        if found.where == "top" and package in HEAVY:
            allowed = next((may for prefix, may in HEAVY_TOPS if found.importer.startswith(prefix)), frozenset())
            if package not in allowed:
                wrong.append(found)
    assert not wrong, listed(wrong)
