"""The names of Transformer Engine that fp8bench calls, with their arguments: read off its sources by their syntax.

`python -m tests.backends.te_names FILE` writes the table again from a wheel of transformer_engine (its sdist of the
torch part holds no Python but what builds it).
"""

from __future__ import annotations

import ast
import sys
import zipfile
from pathlib import Path

TABLE = Path(__file__).with_name("te_names.txt")
# Module of the wheel -> classes that are called.
MODULES = {
    "transformer_engine/pytorch/module/linear.py": ("Linear",),
    "transformer_engine/pytorch/module/layernorm_linear.py": ("LayerNormLinear",),
    "transformer_engine/pytorch/module/layernorm_mlp.py": ("LayerNormMLP",),
    "transformer_engine/pytorch/transformer.py": ("TransformerLayer",),
    "transformer_engine/pytorch/quantization.py": ("autocast",),
    "transformer_engine/common/recipe/__init__.py": (
        "DelayedScaling", "Float8CurrentScaling", "Float8BlockScaling", "MXFP8BlockScaling", "NVFP4BlockScaling",
    ),
}  # fmt: skip
ATTENTION = "transformer_engine/pytorch/attention/multi_head_attention.py"
# Attributes that make up a block, and the modules that read them.
PARTS = {
    "TransformerLayer.self_attention": "transformer_engine/pytorch/transformer.py",
    "TransformerLayer.layernorm_mlp": "transformer_engine/pytorch/transformer.py",
    "MultiheadAttention.layernorm_qkv": ATTENTION,
    "MultiheadAttention.proj": ATTENTION,
}
# The pass in which a layer casts its weights and caches them.
FIRST = "is_first_microbatch"
META = "transformer_engine/pytorch/module/base.py"


def derived(wheel: Path) -> str:
    lines = []
    with zipfile.ZipFile(wheel) as archive:
        for module, names in MODULES.items():
            tree = ast.parse(archive.read(module))
            classes = {node.name: node for node in tree.body if isinstance(node, ast.ClassDef)}
            lines += [f"{name}({', '.join(arguments(classes[name]))})" for name in names]
            lines += [f"first micro-batch {name}" for name in names if FIRST in called(classes[name])]
        base = ast.unparse(ast.parse(archive.read(META)))
        lines += [
            f"fp8_meta {key}"
            for key in ("scaling_fwd", "scaling_bwd")
            if f"self.fp8_meta['{key}'].amax_history" in base
        ]
        lines += [f"part {name}" for name, module in PARTS.items() if _assigns(archive.read(module), name)]
        exported = ast.unparse(ast.parse(archive.read("transformer_engine/pytorch/__init__.py")))
        for module in list(MODULES)[:5]:
            lines += [f"exported {name}" for name in MODULES[module] if f"import {name}" in exported]
    return "".join(f"{line}\n" for line in lines)


def _assigns(source: bytes, name: str) -> bool:
    of, _, attribute = name.partition(".")
    nodes = [node for node in ast.parse(source).body if isinstance(node, ast.ClassDef) and node.name == of]
    return any(f"self.{attribute} = " in ast.unparse(node) for node in nodes)


def arguments(node: ast.ClassDef) -> list[str]:
    made = next((item for item in node.body if isinstance(item, ast.FunctionDef) and item.name == "__init__"), None)
    if made is None:
        return [ast.unparse(item.target) for item in node.body if isinstance(item, ast.AnnAssign)]
    return [item.arg for item in (*made.args.args, *made.args.kwonlyargs)][1:]


def called(node: ast.ClassDef) -> list[str]:
    made = next((item for item in node.body if isinstance(item, ast.FunctionDef) and item.name == "forward"), None)
    return [] if made is None else [item.arg for item in made.args.args]


def recorded() -> dict[str, tuple[str, ...]]:
    lines = [line for line in TABLE.read_text().splitlines() if line.endswith(")")]
    split = (line[:-1].partition("(") for line in lines)
    return {name: tuple(given.split(", ")) for name, _, given in split}


if __name__ == "__main__":
    TABLE.write_text(derived(Path(sys.argv[1])))
