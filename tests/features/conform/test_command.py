"""conform from words to tables and exit codes, through a real worker; lies come as a file of precisions."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from fp8bench.features.conform.command import render_page
from fp8bench.model import DeviceFacts, Level, Support
from fp8bench.model.promises import Conformity, Difference, FirstDifferingElement, ModeConformity
from fp8bench.report.terminal.layout import render
from tests.commands import Say
from tests.nn.test_scaled_arithmetic import NEEDS_PRODUCTS
from tests.own_suites import forgotten

# Each deviates in the named way; all start from 'honest'.
LIARS = """\
from dataclasses import replace

import torch

from fp8bench.formats.codes import encode_with_torch
from fp8bench.formats.grids import E5M2
from fp8bench.formats.recipes import Accumulator
from fp8bench.nn.arithmetics import RecipeArithmetic, ScaledArithmetic
from fp8bench.numerics.products import to_dtype
from fp8bench.numerics.products import short_product
from fp8bench.registry import precisions

Rows, Tensor = type(precisions.get("fp8-rowwise")), type(precisions.get("fp8-e4m3"))


def lie(name, base, **methods):
    arithmetic = type("Lying", (ScaledArithmetic,), methods)
    body = {"name": name, "summary": name, "aliases": (), "native": lambda self, facts: arithmetic(self.recipe)}
    precisions.register(name)(type("Liar", (base,), body))


def honest(self, a, b, dtype):
    return ScaledArithmetic.product(self, a, b, dtype)


def rows(self, a, b, dtype):
    return honest(self, a, b, dtype).flip(0)


def scales(self, a, b, dtype):
    return honest(self, replace(a, scale=a.scale.flatten().flip(0).view(-1, 1)), b, dtype)


def short(self, a, b, dtype):
    values = (self.restore(one, torch.float32) for one in (a, b))
    return to_dtype(short_product(*values, Accumulator.SHORT), dtype)


def cut(self, a, b, dtype):
    exact = honest(self, a, b, torch.float32)
    return (exact.view(torch.int32) & -(1 << 16)).view(torch.float32).to(dtype)


def other_format(self, tensor, role, repeat):
    operand = ScaledArithmetic.operand(self, tensor, role, repeat)
    return replace(operand, data=operand.data.to(torch.float8_e5m2))


def truncated(self, tensor, role, repeat):
    operand = ScaledArithmetic.operand(self, tensor, role, repeat)
    beyond = self.restore(operand, torch.float32).abs() > tensor.float().abs()
    codes = operand.data.view(torch.uint8)
    return replace(operand, data=(codes - (beyond & (codes & 127 > 0)).to(torch.uint8)).view(operand.data.dtype))


def unclamped(self, tensor, role):
    beyond = torch.where(tensor.abs() > 448, torch.nan, tensor)
    return replace(ScaledArithmetic.cast_without_scale(self, tensor, role), data=beyond.to(torch.float8_e4m3fn))


lie("honest", Tensor)
lie("lying-rows", Tensor, product=rows)
lie("lying-scales", Rows, product=scales)
lie("lying-sums", Tensor, product=short)
lie("lying-results", Tensor, product=cut)
lie("lying-format", Tensor, operand=other_format)
lie("lying-casts", Tensor, operand=truncated)
lie("lying-overflow", Tensor, cast_without_scale=unclamped)
"""
# Expected findings: in casts, and in products with bfloat16 results, whose order of summation depends on the CPU.
FOUND = {
    "honest": ({"none"}, {"none"}),
    "lying-rows": ({"none"}, {"layout"}),
    "lying-scales": ({"none"}, {"scale"}),
    "lying-sums": ({"none"}, {"accumulation"}),
    "lying-results": ({"none"}, {"rounding"}),
    "lying-format": ({"none", "unexplained"}, None),
    "lying-casts": ({"none", "rounding"}, {"none"}),
    "lying-overflow": ({"none", "overflow"}, {"none"}),
}


def by_part(mode: dict[str, Any]) -> tuple[set[str], set[str]]:
    """The differences of casts, and of products with bfloat16 results without those from the order of sums."""
    casts = {case["difference"] for case in mode["found"] if case["what"].startswith("cast")}
    products = {case["difference"] for case in mode["found"] if case["what"].endswith("bfloat16 out")}
    return casts, {"none" if case == "order" else case for case in products}


@pytest.mark.slow
@NEEDS_PRODUCTS
def test_every_lie_is_found_and_named(fp8bench: Say, store: Path) -> None:
    Path("liars.py").write_text(LIARS)
    words = ("conform", "--import", "./liars.py", "--device", "cpu", "--dtypes")
    with forgotten(Path.cwd()):
        code, out, _ = fp8bench(*words, ",".join(FOUND), "--json")
    document = json.loads(out)
    assert code == 1 and not document["conforms"]
    found = {mode["mode"]: by_part(mode) for mode in document["modes"]}
    for name, (casts, products) in FOUND.items():
        assert found[name][0] == casts, name
        assert products is None or found[name][1] == products, name
    assert {mode["mode"] for mode in document["modes"] if mode["conforms"]} == {"honest"}


@pytest.mark.slow
def test_torchs_kernels_conform_on_a_cpu(fp8bench: Say, store: Path) -> None:
    code, out, _ = fp8bench("conform", "--device", "cpu", "--dtypes", "bf16,fp8,fp8-rowwise,fp8-e5m2")
    assert code == 0
    assert "native against emulated on cpu" in out and "up to the order of sums" in " ".join(out.split())
    assert "fp8-e5m2, 3 casts and products: " in out and "no product of two E5M2" in out
    code, out, _ = fp8bench("conform", "--device", "cpu", "--dtypes", "tf32")
    assert code == 3 and "nothing could be compared" in out and "not native here" in out


def test_an_unknown_precision_is_refused_before_anything_starts(fp8bench: Say, store: Path) -> None:
    code, _, error = fp8bench("conform", "--dtypes", "fp9")
    assert code == 2 and "fp9" in error


def test_the_page_tells_what_differs() -> None:
    first = FirstDifferingElement((3, 17), 1.5, 1.25)
    wrong = Conformity("fp8", "forward product", "8x8x8", Difference.SCALE, "rows scaled by 2", 9, 64, 3.0, first)
    same = Conformity("fp8", "cast of input", "128x2048", Difference.NONE, total=262144)
    facts = DeviceFacts("cuda", 0, "NVIDIA H200", 1 << 37, "2.13.0")
    mode = ModeConformity("fp8", Support(Level.NATIVE, ""), (same, wrong))
    text = " ".join(render(render_page(facts, [mode]), width=120).split())
    assert "fp8 native 2 1 - - 1 -" in text
    assert "[3,17] 1.5, emulated 1.25 rows scaled by 2" in text and not mode.conforms
    units = Conformity("fp8", "product", "8x8x8", Difference.UNITS, "as its units", 3, 64, 2.0, wrong.first)
    mode = ModeConformity("fp8", Support(Level.NATIVE, ""), (same, units))
    text = " ".join(render(render_page(facts, [mode]), width=120).split())
    assert "fp8 native 2 1 - 1 - -" in text and mode.conforms
    undone = Conformity("fp8", "forward product", "8x8x8", None, "no such kernel")
    mode = ModeConformity("fp8", Support(Level.EMULATED, ""), (same, undone))
    text = " ".join(render(render_page(facts, [mode]), width=120).split())
    assert "fp8 (in part): kernels and emulation give" in text and "torch's kernels: fp8 (in part)" in text
