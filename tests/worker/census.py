"""Public names of torch that may be switches, read from its source, and what was decided of each.

`python -m tests.worker.census FOLDER` compares the folder of an unpacked torch with the table.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

TABLE = Path(__file__).with_name("torch_names.txt")
# Prefixes of functions that set something. Everything public below torch.backends counts, whatever its name.
_SETS = re.compile(r"(set|enable|disable|use|activate|allow|restore)(_|$)|\w+_enable$")
# Graphs, exports, quantised networks and distributed code, none of which is measured; and torch's testing modules.
_ELSEWHERE = {
    "ao",
    "backends",
    "contrib",
    "distributed",
    "export",
    "fx",
    "masked",
    "nested",
    "onnx",
    "package",
    "quantization",
    "testing",
}
_IN_C = ("_C/__init__.pyi", "_C/_VariableFunctions.pyi")


def census(torch: Path) -> set[str]:
    """The names that the source below a folder defines; their top package is `torch`."""
    backends = {path: ast.parse(path.read_text()) for path in _public((torch / "backends").rglob("*.py"), torch)}
    setters = {
        node.name: _written(node)
        for tree in backends.values()
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef)
    }
    found = {name for path, tree in backends.items() for name in _of_backend(_dotted(path, torch), tree, setters)}
    for path in _public([*torch.glob("*.py"), *torch.glob("*/*.py"), *torch.glob("*/*/__init__.py")], torch):
        if path.relative_to(torch).parts[0] not in _ELSEWHERE:
            found |= {f"{_dotted(path, torch)}.{name}" for name in _functions(path) if _SETS.match(name)}
    found |= {f"torch.{name}" for place in _IN_C for name in _functions(torch / place) if _SETS.match(name)}
    # Some C functions are in no stub, but named among those that cannot be overridden.
    found |= set(re.findall(r"torch\.set_\w+", (torch / "overrides.py").read_text()))
    return found


def decided(version: str) -> dict[str, str]:
    """The table's names for a minor version, each with its heading."""
    known = dict[str, str]()
    heading = ""
    for line in filter(None, TABLE.read_text().splitlines()):
        if line.startswith("["):
            heading = line.strip("[]")
        elif not line.startswith("#"):
            place, *words = line.split()
            for word in words:
                name, _, some = word.rstrip(")").partition("(")
                full = f"{place.rstrip(':')}.{name}" if place != ":" else name
                assert full not in known, f"{full}is twice in the table"
                known[full] = heading if not some or version in some.split(",") else ""
    return {name: under for name, under in known.items() if under}


def versions() -> list[str]:
    line = next(line for line in TABLE.read_text().splitlines() if line.startswith("# versions: "))
    return line.removeprefix("# versions: ").split()


def _public(paths: Iterator[Path] | list[Path], torch: Path) -> list[Path]:
    def hidden(path: Path) -> bool:
        return any(part.startswith("_") and part != "__init__.py" for part in path.relative_to(torch).parts)

    return sorted(path for path in paths if not hidden(path))


def _dotted(path: Path, torch: Path) -> str:
    parts = path.relative_to(torch.parent).with_suffix("").parts
    return ".".join(part for part in parts if part != "__init__")


def _functions(path: Path) -> list[str]:
    body = ast.parse(path.read_text()).body
    named = [node.name for node in body if isinstance(node, ast.FunctionDef | ast.ClassDef)]
    for node in body:
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", node)]
        if ast.unparse(targets[0]) == "__all__":
            named += [str(constant.value) for constant in ast.walk(node.value) if isinstance(constant, ast.Constant)]
    return [name for name in named if not name.startswith("_")]


def _written(kind: ast.ClassDef) -> set[str]:
    found = set()
    for function in kind.body:
        if isinstance(function, ast.FunctionDef) and function.name == "__setattr__":
            asked = [node for node in ast.walk(function) if isinstance(node, ast.Compare)]
            for node in asked:
                if ast.unparse(node.left) == "name" and isinstance(node.ops[0], ast.Eq):
                    found |= {constant.value for constant in node.comparators if isinstance(constant, ast.Constant)}
    return {str(name) for name in found}


def _of_backend(top: str, node: ast.AST, setters: dict[str, set[str]]) -> Iterator[str]:
    """A module's names, and those of classes that replace their module."""
    if isinstance(node, ast.Module):
        yield top
    for one in getattr(node, "body", []):
        if isinstance(one, ast.If):
            yield from _of_backend(top, one, setters)
        elif isinstance(one, ast.ClassDef):
            replaces = any("Module" in ast.unparse(base) for base in one.bases)
            if replaces or not one.name.startswith("_"):
                yield from () if replaces else (f"{top}.{one.name}",)
                yield from _of_backend(top if replaces else f"{top}.{one.name}", one, setters)
        elif isinstance(one, ast.FunctionDef) and not one.name.startswith("_"):
            yield f"{top}.{one.name}"
        elif isinstance(one, ast.Assign | ast.AnnAssign):
            targets = one.targets if isinstance(one, ast.Assign) else [one.target]
            for name in (target.id for target in targets if isinstance(target, ast.Name) and target.id[0] != "_"):
                yield f"{top}.{name}"
                made = ast.unparse(one.value.func) if isinstance(one.value, ast.Call) else ""
                yield from (f"{top}.{name}.{word}" for word in setters.get(made, ()))


def _main() -> None:
    torch = Path(sys.argv[1])
    match = re.search(r"__version__ = ['\"](\d+\.\d+)", (torch / "version.py").read_text())
    assert match is not None
    names = census(torch)
    known = decided(match[1])
    print(f"torch {match[1]}: {len(names)} names")
    print("\n".join([f"new: {name}" for name in sorted(names - known.keys())]))
    print("\n".join([f"gone: {name}" for name in sorted(known.keys() - names)]))


if __name__ == "__main__":
    _main()
