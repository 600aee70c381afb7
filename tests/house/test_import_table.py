"""Who may import whom, and how long a module and a function may be.

The table below is the house's plan; the tests hold every module of fp8bench against it.
"""

from __future__ import annotations

import ast
import graphlib
import itertools
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from tests.counts import for_each
from tests.house.sources import FILES, PACKAGE, ROOT, children, descendants, tree_of

FLOOR = frozenset({"errors", "files", "model", "suggestions", "units"})
ANYONE = frozenset({"*"})
TENSORS = frozenset({"formats", "nn", "numerics"})
NAMES = frozenset({"protocols", "registry"})
PARENT = FLOOR | NAMES | {"analysis", "measure", "plan", "report", "store", "user_code"}

# Room -> the rooms it may import; a room is a module or package directly under fp8bench. Modules of a room may import
# each other, except leaves (LEAVES): workloads, precisions and devices do not depend on each other.
TABLE: dict[str, frozenset[str]] = {
    "suggestions": frozenset(),
    "errors": frozenset({"suggestions"}),
    "units": frozenset(),
    "model": frozenset({"errors", "units"}),
    "files": frozenset({"errors", "model", "units"}),
    "protocols": FLOOR,
    "registry": FLOOR | {"protocols"},
    "user_code": FLOOR | NAMES,
    "suites": FLOOR | NAMES,
    "formats": FLOOR | {"protocols"},
    "numerics": FLOOR | {"protocols", "formats"},
    "nn": FLOOR | {"protocols", "formats", "numerics"},
    "profiler": FLOOR | {"protocols"},
    "feature_list": frozenset(),
    "workloads": FLOOR | NAMES | TENSORS | {"user_code"},
    "precisions": FLOOR | NAMES | TENSORS,
    "backends": FLOOR | NAMES | TENSORS,
    "devices": FLOOR | NAMES | TENSORS | {"profiler"},
    "analysis": FLOOR | NAMES | {"formats"},
    "plan": FLOOR | NAMES | {"user_code"},
    "tape": FLOOR | NAMES | TENSORS | {"profiler"},
    "worker": FLOOR | NAMES | TENSORS | {"profiler", "tape", "user_code"},
    "store": FLOOR | NAMES | {"analysis", "plan"},
    "measure": FLOOR | NAMES | {"store", "user_code", "worker"},
    "report": FLOOR | NAMES | {"analysis", "formats", "feature_list"},
    "pipeline": PARENT,
    "jobs": PARENT
    | TENSORS
    | {"pipeline", "profiler", "worker", "backends", "devices", "precisions", "workloads", "feature_list"},
    "features": PARENT | TENSORS | {"pipeline", "profiler", "worker", "jobs", "cli", "tape", "workloads"},
    "cli": ANYONE,
    "api": ANYONE,
    "asv_bridge": ANYONE,
    "__init__": ANYONE,
    "__main__": ANYONE,
}
# Modules of formats on numbers, products and devices that need no torch.
LIGHT_FORMATS = frozenset(
    f"fp8bench.formats.{name}" for name in ("grids", "hardware", "product_rules", "recipe_support", "recipes")
)
LIGHT_NN_NAMES = (
    "layer_workloads",
    "parallel.ways",
    "served",
    "served_workloads",
    "shared_precisions",
    "shared_workloads",
    "sizes",
)
LIGHT_NN = frozenset(f"fp8bench.nn.{name}" for name in LIGHT_NN_NAMES)
LIGHT = LIGHT_FORMATS | LIGHT_NN
# Rooms that others may import only in part: (importer's prefix, room) -> the modules.
PARTS: dict[tuple[str, str], frozenset[str]] = {
    ("fp8bench.store", "plan"): frozenset({"fp8bench.plan.checked_workload"}),
    ("fp8bench.report", "formats"): LIGHT_FORMATS,
    ("fp8bench.analysis", "formats"): LIGHT_FORMATS,
    ("fp8bench.measure", "store"): frozenset({"fp8bench.store.asv.identity"}),
    ("fp8bench.measure", "worker"): frozenset({"fp8bench.worker.bench", "fp8bench.worker.faults"}),
}
# A feature may import the core below the command line, the command line from its command and its options and outputs,
# and only these other features.
OTHER_FEATURES: dict[str, frozenset[str]] = {
    "advise": frozenset({"infer", "sensitivity", "train"}),
    "claim": frozenset({"train"}),
    "gate": frozenset({"duel"}),
    "infer": frozenset({"train"}),
    "watch": frozenset({"train"}),
}
# Modules of a feature that may import the command line.
DOORS = frozenset({"command", "progress", "api"})
LEAVES = frozenset({"backends", "precisions", "devices", "workloads"})
OUTSIDE = frozenset({"suites", "reports", "tests"})
# Rooms that every reader knows, which the page's table omits.
OUTERMOST = frozenset({"__init__", "__main__", "errors", "files", "suggestions", "units"})
LOOSE = OUTERMOST | {"api", "asv_bridge", "feature_list", "pipeline", "registry", "suites"}
MOST_ROOMS = 22
# Lines that a person can read at once.
LONGEST_MODULE = 500
LONGEST_FUNCTION = 85

HEAVY = frozenset({"torch", "numpy", "pandas", "matplotlib", "jinja2", "yaml"})
# Imports allowed inside a function: heavy or optional packages.
LAZY = HEAVY | {
    "accelerate",
    "asv_runner",
    "ctypes",
    "pyarrow",
    "pynvml",
    "ray",
    "safetensors",
    "shtab",
    "submitit",
    "tensorboard",
    "deep_gemm",
    "torchao",
    "transformer_engine",
    "wandb",
}
# Where modules may import heavy packages at the top; the first matching prefix counts. These run in an audit's worker.
AUDITING = (
    "auditor",
    "host",
    "layer_numbers",
    "layer_products",
    "model",
    "operands",
    "promises",
    "readings",
    "results",
    "times",
)
# Modules that a bench imports on request, because the parent process imports the bench.
ONCE_ASKED = (
    "bits",
    "conformity",
    "products",
    "step_effect",
    "tape_pass",
    "torch_state",
    "torch_switches",
    "trial",
)
HEAVY_TOPS: tuple[tuple[str, frozenset[str]], ...] = (
    ("fp8bench.analysis.stats", frozenset({"numpy"})),
    ("fp8bench.cli.config_file", frozenset({"yaml"})),
    ("fp8bench.store.figures.", frozenset({"numpy"})),
    ("fp8bench.analysis.", HEAVY - {"torch"}),
    *((module, frozenset[str]()) for module in LIGHT),
    ("fp8bench.formats.", frozenset({"numpy", "torch"})),
    ("fp8bench.numerics.", frozenset({"numpy", "torch"})),
    ("fp8bench.nn.", frozenset({"numpy", "torch"})),
    *((f"fp8bench.features.train.lab.{light}", frozenset[str]()) for light in ("lab", "rank_lab")),
    ("fp8bench.features.train.lab.", frozenset({"numpy", "torch"})),
    ("fp8bench.features.train.step", frozenset({"torch"})),
    ("fp8bench.tape.", frozenset({"torch"})),
    *((f"fp8bench.worker.{name}", frozenset({"torch"})) for name in ONCE_ASKED),
    *((f"fp8bench.features.audit.{name}", frozenset({"torch"})) for name in AUDITING),
    *((f"fp8bench.features.bench.{name}", frozenset({"torch"})) for name in ("calls", "checks")),
    ("fp8bench.features.infer.quality", frozenset({"numpy", "torch"})),
    ("fp8bench.features.", frozenset({"numpy"})),
    ("fp8bench.report.page.drawing.pictures", frozenset({"matplotlib"})),
)
# Module -> additional imports allowed inside a function, with the reason.
LAZY_ALLOWED: dict[str, frozenset[str]] = {
    # The package's namespace holds only public names.
    "fp8bench": frozenset({"importlib"}),
    # hashlib loads OpenSSL, needed only for user modules and long names, but not for --help.
    "fp8bench.user_code": frozenset({"hashlib"}),
    "fp8bench.store.asv.identity": frozenset({"hashlib"}),
    "fp8bench.files": frozenset({"hashlib"}),
    # The kernel's process loads none of the judge's modules.
    "fp8bench.features.audit.host": frozenset({"fp8bench.features.audit.model"}),
    "fp8bench.model.file_names": frozenset({"hashlib"}),
    # --help imports neither model nor report.
    "fp8bench.cli.main": frozenset({"fp8bench.plan.asked_suites", "fp8bench.user_code", "fp8bench.cli.config_file"}),
    "fp8bench.cli.streams": frozenset({"fp8bench.report.elements", "fp8bench.report.terminal.layout"}),
    # Its imports come while the worker imports torch.
    "fp8bench.cli.outputs": frozenset({"fp8bench.report.page.html"}),
    # Only a run in this process has a bench here.
    "fp8bench.measure.handle": frozenset({"fp8bench.worker.bench", "fp8bench.worker.faults"}),
    # An interrupt may come while the command line is being imported.
    "fp8bench.__main__": frozenset({"fp8bench.cli.main"}),
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
    parts = ["fp8bench", *path.relative_to(PACKAGE).with_suffix("").parts]
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {name_of(path): path for path in FILES}


def room_of(module: str) -> str:
    """The room of a module of fp8bench; the package itself is the room `__init__`."""
    return module.split(".")[1] if "." in module else "__init__"


def targets(node: ast.Import | ast.ImportFrom) -> Iterator[str]:
    """The modules a statement imports. The version is a constant that every module may import."""
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
        return
    assert node.level == 0, "imports are absolute"
    base = node.module or ""
    names = [f"{base}.{alias.name}" for alias in node.names if (base, alias.name) != ("fp8bench", "__version__")]
    yield from dict.fromkeys(name if name in MODULES else base for name in names)


def scan(node: ast.AST, importer: str, where: str) -> Iterator[Import]:
    for child in children(node):
        if isinstance(child, ast.Import | ast.ImportFrom):
            yield from (Import(importer, target, where, child.lineno) for target in targets(child))
        elif isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
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
    return tuple(scan(tree_of(MODULES[module]), module, "top"))


def all_imports() -> list[Import]:
    return list(itertools.chain.from_iterable(map(imports_of, MODULES)))


def own_imports() -> list[Import]:
    return [found for found in all_imports() if found.target.split(".")[0] == "fp8bench"]


def heavy_modules() -> frozenset[str]:
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
    return "\n" + "\n".join(str(one) for one in found)


def test_the_table_has_every_room_and_no_other() -> None:
    assert set(TABLE) == {room_of(module) for module in MODULES}


def feature_of(module: str) -> str:
    parts = module.split(".")
    return parts[2] if parts[1:2] == ["features"] and len(parts) > 2 else ""


def test_each_feature_stands_apart() -> None:
    wrong = []
    for found in own_imports():
        here, there = feature_of(found.importer), feature_of(found.target)
        if there and there != here and TABLE[room_of(found.importer)] != ANYONE:
            wrong += [] if there in OTHER_FEATURES.get(here, ()) else [found]
        if there and not here and found.where == "top":  # the command line also starts without
            wrong.append(found)
        if here and room_of(found.target) in ("cli", "api") and found.importer.split(".")[3] not in DOORS:
            wrong.append(found)
    assert not wrong, listed(wrong)


def test_no_loose_modules_beside_the_rooms() -> None:
    assert {path.stem for path in PACKAGE.glob("*.py")} <= LOOSE
    assert sum((path / "__init__.py").is_file() for path in PACKAGE.iterdir()) <= MOST_ROOMS


def test_rooms_import_what_the_table_allows() -> None:
    wrong = []
    for found in own_imports():
        room, target = room_of(found.importer), room_of(found.target)
        if target == room:
            continue
        part = PARTS.get((f"fp8bench.{room}", target))
        if (TABLE[room] != ANYONE and target not in TABLE[room]) or (part is not None and found.target not in part):
            wrong.append(found)
    assert not wrong, listed(wrong)


def test_leaves_never_import_each_other() -> None:
    wrong = [found for found in own_imports() if room_of(found.importer) in LEAVES and room_of(found.target) in LEAVES]
    assert not wrong, listed(wrong)


@for_each("level", ["rooms", "modules"])
def test_no_cycles(level: str) -> None:
    graph: dict[str, set[str]] = {}
    for found in own_imports():
        here, there = found.importer, found.target
        if level == "rooms":
            here, there = room_of(here), room_of(there)
        if here != there:
            graph.setdefault(here, set()).add(there)
    graphlib.TopologicalSorter(graph).prepare()


def test_fp8bench_never_imports_what_surrounds_it() -> None:
    wrong = [found for found in all_imports() if found.target.split(".")[0] in OUTSIDE]
    assert not wrong, listed(wrong)


def test_imports_inside_functions_are_heavy_or_optional() -> None:
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


def test_what_is_allowed_is_needed() -> None:
    used = {(found.importer, found.target) for found in all_imports() if found.where == "function"}
    for module, targets in LAZY_ALLOWED.items():
        assert not {(module, target) for target in targets} - used
    features = {(feature_of(found.importer), feature_of(found.target)) for found in own_imports()}
    for feature, targets in OTHER_FEATURES.items():
        assert not {(feature, target) for target in targets} - features


def test_heavy_packages_at_the_top_only_where_they_are_the_matter() -> None:
    wrong = []
    for found in all_imports():
        package = found.target.split(".")[0]
        if found.where == "top" and package in HEAVY:
            allowed = next((may for prefix, may in HEAVY_TOPS if found.importer.startswith(prefix)), frozenset())
            if package not in allowed:
                wrong.append(found)
    assert not wrong, listed(wrong)


def test_the_page_names_what_is_there() -> None:
    page = (PACKAGE.parent / "ARCHITECTURE.md").read_text()
    first_column = " ".join(line.split("|")[1] for line in page.splitlines() if line.startswith("| `"))
    assert set(re.findall(r"`(\w+)`", first_column)) >= set(TABLE) - OUTERMOST
    paths = set(re.findall(r"`(\w+/[\w/]*(?:/|\.py))`", page))
    assert len(paths) > 20
    assert not {path for path in paths if not (PACKAGE / path).exists() and not (PACKAGE.parent / path).exists()}


def test_the_walk_names_functions_that_exist() -> None:
    walk = (PACKAGE.parent / "ARCHITECTURE.md").read_text().partition("## The walk")[2].partition("\n## ")[0]
    stops = re.findall(r"`([\w/]+\.py): (\w+)`", walk)
    assert len(stops) >= 15 and len(walk.split()) <= 600
    for path, name in stops:
        assert re.search(rf"^(?:def|class) {name}\b", (PACKAGE / path).read_text(), re.MULTILINE), f"{path}: {name}"
    rooms = [path.partition("/")[0] for path, _ in stops]
    assert sum(room != previous for previous, room in itertools.pairwise(rooms)) <= 45


def test_no_module_is_too_long() -> None:
    lines = {str(path.relative_to(ROOT)): len(path.read_text().splitlines()) for path in FILES}
    offenders = {name: length for name, length in lines.items() if length > LONGEST_MODULE}
    assert not offenders, f"modules over {LONGEST_MODULE} lines: {offenders}"


def test_no_function_is_too_long() -> None:
    offenders = {}
    for path in FILES:
        for node in descendants(tree_of(path)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
                length = (node.end_lineno or node.lineno) - first + 1
                if length > LONGEST_FUNCTION:
                    offenders[f"{path.relative_to(ROOT)}:{first} {node.name}"] = length
    assert not offenders, f"functions over {LONGEST_FUNCTION} lines: {offenders}"
