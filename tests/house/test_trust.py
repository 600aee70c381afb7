"""docs/run-format.md lists every place where fp8bench reads files that others may have written."""

from __future__ import annotations

import ast
import re

from tests.house.sources import ROOT, tree_of

MODULES = {
    "pickle",
    "marshal",
    "shelve",
    "dill",
    "cloudpickle",
    "socket",
    "socketserver",
    "http.server",
    "asyncio",
    "mmap",
    "tempfile",
    "multiprocessing",
    "multiprocessing.connection",
    "multiprocessing.shared_memory",
}
NAMES = {
    "FileStore",
    "TCPStore",
    "_unpickler",
    "PlainUnpickler",
    "elastic_launch",
    "SharedMemory",
    "rpc",
    "ExtensionFileLoader",
}


def uses(tree: ast.AST) -> set[str]:
    found = set()
    for node in ast.walk(tree):
        match node:
            case ast.Import():
                found |= {one.name for one in node.names} & MODULES
            case ast.ImportFrom():
                found |= ({node.module} & MODULES) | ({one.name for one in node.names} & NAMES)
            case ast.Attribute(value=ast.Name(id="torch"), attr="load"):
                found.add("torch.load")
            case ast.Attribute(attr=name) | ast.Name(id=name) if name in NAMES:
                found.add(name)
    return found


WORDS = re.compile("|".join({name.split(".")[0] for name in MODULES} | NAMES | {r"\bload\b"}))


def test_the_table_names_every_place() -> None:
    used = set()
    for top in ("fp8bench", "suites"):
        for path in (ROOT / top).rglob("*.py"):
            name = path.relative_to(ROOT).as_posix().removeprefix("fp8bench/")
            if WORDS.search(path.read_text()) and uses(tree_of(path)):
                used.add(name)
    rows = [line for line in (ROOT / "docs" / "run-format.md").read_text().splitlines() if line.startswith("| ")]
    named = set(re.findall(r"`([\w/]+\.py)`", "\n".join(rows)))
    assert named == used, (sorted(used - named), sorted(named - used))


def test_a_use_is_found_however_it_is_written() -> None:
    for text in (
        "import pickle",
        "from multiprocessing.connection import Listener",
        "import torch\ntorch.load(f)",
        "from torch.distributed import TCPStore",
        "dist.TCPStore('a', 1)",
    ):
        assert uses(ast.parse(text)), text
    assert not uses(ast.parse("import json\njson.load(f)"))
