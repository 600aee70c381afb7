"""Products are tried before they are timed: planted lies, by value and through a real worker."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from fp8bench import pipeline
from fp8bench.model import Case, DeviceFacts, Level, Request, Status
from fp8bench.nn.arithmetics import RecipeArithmetic, ScaledArithmetic
from fp8bench.nn.block_arithmetic import BlockArithmetic
from fp8bench.nn.linear import linear
from fp8bench.nn.whole_layers import LibraryLayer, LibraryLayerArithmetic
from fp8bench.numerics.products import multiply_in_float32
from fp8bench.protocols import Arithmetic, Operand, Precision, Role, SilentObserver, SilentPhases
from fp8bench.registry import precisions
from fp8bench.worker.trial import ProductTrials, find_wrong_product
from tests.counts import for_each
from tests.facts import B200, CPU, H200
from tests.nn.grouped_kernel import kernel
from tests.nn.test_scaled_arithmetic import NEEDS_PRODUCTS
from tests.own_suites import suite_file

LIE = """
from fp8bench.nn.arithmetics import RecipeArithmetic
from fp8bench.suites import Backend, Level, Support, backends


class WithoutTheLastBlock(RecipeArithmetic):
    def product(self, a, b, dtype):
        return super().product(type(a)(a.data[:, 32:]), type(b)(b.data[:, 32:]), dtype)


@backends.register("lying")
class Lying(Backend):
    name = "lying"
    summary = "claims a unit that multiplies wrongly"

    def support(self, precision, facts):
        return Support(Level.NATIVE, "so it says")

    def arithmetic(self, precision, facts):
        return WithoutTheLastBlock(precision.recipe)


@backends.register("honest")
class Honest(Lying):
    name = "honest"
    summary = "the same, and right"

    def arithmetic(self, precision, facts):
        return RecipeArithmetic(precision.recipe)
"""


@pytest.fixture
def lie(tmp_path: Path) -> Iterator[str]:
    """A file that registers a backend whose product leaves out part of the contraction."""
    with suite_file(tmp_path, LIE) as path:
        yield path


@pytest.mark.slow
def test_a_backend_that_multiplies_wrongly_is_refused_in_numbers(lie: str, tmp_path: Path) -> None:
    request = Request(
        "gemm",
        ("bf16", "fp8:backend=lying", "fp8:backend=honest"),
        quick=True,
        rounds=2,
        energy=False,
        axes=(("shape", ("64",)),),
        imports=(lie,),
    )
    run = pipeline.execute(request, tmp_path / "store", SilentObserver(), "")
    records = {record.case.precision: record for record in run.records}
    refused = records["fp8:backend=lying"]
    assert refused.status is Status.SKIPPED and refused.support.level is Level.REFUSED and refused.timing is None
    assert "its forward product is wrong on cpu: it differs from the same product in fp64 by 0." in refused.reason
    assert records["fp8:backend=honest"].status is Status.OK and records["bf16"].status is Status.OK


class Off(RecipeArithmetic):
    """A product that is off by a share in some rows of its second operand."""

    share = 0.05

    def product(self, a: Operand, b: Operand, dtype: torch.dtype) -> Tensor:
        return super().product(a, b, dtype) * (1 + self.share)


class Nothing(RecipeArithmetic):
    """A runtime that computes nothing."""

    def product(self, a: Operand, b: Operand, dtype: torch.dtype) -> Tensor:
        return torch.full((a.data.shape[0], b.data.shape[0]), torch.nan, dtype=dtype)


class Zeros(RecipeArithmetic):
    """A runtime whose memory is zeros: codes, their product, and its reference."""

    def operand(self, tensor: Tensor, role: Role, again: bool) -> Operand:
        return Operand(torch.zeros_like(tensor, dtype=torch.float32), gradient=role is Role.GRADIENT)


class OtherRows(RecipeArithmetic):
    """Permutes the rows of a small product, so that only the weight gradient is wrong."""

    def product(self, a: Operand, b: Operand, dtype: torch.dtype) -> Tensor:
        found = super().product(a, b, dtype)
        return found.flip(0) if found.numel() < 100_000 else found


def wrong(kind: type[RecipeArithmetic], mode: str = "fp8") -> str:
    precision = precisions.get(mode)
    return find_wrong_product(kind(precision.recipe), precision, CPU)  # type: ignore[attr-defined]


@for_each(
    ("kind", "words"),
    [
        (RecipeArithmetic, ""),
        (Off, "forward product is wrong"),
        (Nothing, "by nan"),
        (Zeros, "by nan"),
        (OtherRows, "weight gradient's"),
    ],
)
def test_each_product_is_looked_at(kind: type[RecipeArithmetic], words: str) -> None:
    found = wrong(kind)
    assert words in found and bool(found) == bool(words)
    assert not found or "FP8BENCH_PRODUCTS=unchecked" in found


@for_each("left_out", [0, 128])
@for_each("mode", ["nvfp4", "mxfp4:stochastic=on", "fp8-block"])
def test_whole_layers_may_round_at_random_and_may_leave_nothing_out(mode: str, left_out: int) -> None:
    """Another library's random numbers and rotations differ, and four bits are still accepted."""
    precision = precisions.get(mode)
    other = RecipeArithmetic(precision.recipe, name="another library's")  # type: ignore[attr-defined]

    def build(weight: torch.nn.Parameter) -> LibraryLayer:
        kept = weight.shape[1] - left_out
        return LibraryLayer(lambda x: linear(x[:, :kept], weight[:, :kept], other, SilentPhases()))

    found = find_wrong_product(LibraryLayerArithmetic("other", torch.bfloat16, build), precision, CPU)
    assert ("product is wrong" in found) == bool(left_out) and ("emulation of it" in found) == bool(left_out)


@NEEDS_PRODUCTS
@for_each("mode", ["fp8", "fp8-rowwise", "fp8-delayed", "fp8-rowwise:weight-gradient=bf16"])
def test_products_of_torch_s_that_are_right_pass(mode: str) -> None:
    assert not wrong(ScaledArithmetic, mode)


OTHERS_SCALES = {
    "grouped forward": lambda a, b, scale, *others: kernel(
        a, b, scale.view(torch.uint8).flip(0).view(scale.dtype), *others
    ),
    "grouped weight gradient's": lambda a, b, scale, *others: kernel(
        a, b, scale if b.dim() == 3 else _of_another_part(scale, len(a)), *others
    ),
}


def _of_values(self: BlockArithmetic, a: Operand, b: Operand, dtype: torch.dtype) -> Tensor:
    return multiply_in_float32(*(self.restore(operand, torch.float32) for operand in (a, b)), dtype)


def _of_another_part(scale: Tensor, rows: int) -> Tensor:
    return scale.view(torch.uint8).flatten().roll(rows * 4).view(scale.dtype).view(scale.shape)


@NEEDS_PRODUCTS
@for_each("lie", ["", *OTHERS_SCALES])
@for_each(("mode", "gpu"), [("fp8-rowwise", H200), ("mxfp8", B200)])
def test_products_of_several_weights(mode: str, gpu: DeviceFacts, lie: str, monkeypatch: pytest.MonkeyPatch) -> None:
    precision = precisions.get(mode)
    arithmetic = precision.arithmetic(gpu)
    assert arithmetic.groups
    monkeypatch.setattr(torch.ops.aten._scaled_grouped_mm, "default", OTHERS_SCALES.get(lie, kernel))
    monkeypatch.setattr(BlockArithmetic, "product", _of_values)
    found = find_wrong_product(arithmetic, precision, CPU)
    assert f"its {lie} product is wrong" in found if lie else not found


def tried(monkeypatch: pytest.MonkeyPatch, kind: type[Arithmetic] | None, **environment: str) -> str:
    def arithmetic(self: Precision, facts: DeviceFacts) -> Arithmetic:
        if kind is None:
            raise RuntimeError("CUBLAS_STATUS_NOT_SUPPORTED")
        return kind(self.recipe)  # type: ignore[call-arg, attr-defined]

    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("fp8bench.nn.shared_precisions.RecipePrecision.arithmetic", arithmetic)
    monkeypatch.setattr(DeviceFacts, "key", property(lambda facts: "cpu"))
    return ProductTrials().find_error(Case("gemm", (), "bf16", "cpu", (("mlp", "fp8"),)), H200)


def test_a_map_s_dtypes_are_tried_and_a_failing_product_is_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "fp8: a product of 512x384x256 fails: RuntimeError: CUBLAS_STATUS_NOT_SUPPORTED" in tried(monkeypatch, None)
    assert "fp8: its forward product is wrong" in tried(monkeypatch, Off)
    assert tried(monkeypatch, RecipeArithmetic) == ""
    assert tried(monkeypatch, Nothing, FP8BENCH_PRODUCTS="unchecked") == ""
    assert tried(monkeypatch, Nothing, FP8BENCH_PRODUCTS="") != ""


def test_a_precision_is_tried_once_and_emulation_and_torch_s_own_never(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("bf16", "fp32", "fp8", "fp8:backend=emulated"):
        assert ProductTrials().find_error(Case("gemm", (), name, "cpu"), CPU) == ""
    calls = []
    monkeypatch.setattr(
        "fp8bench.worker.trial._try_precision", lambda precision, facts, single: calls.append(precision.mode) or "no"
    )
    trials = ProductTrials()
    case = Case("gemm", (), "fp8", "cuda:0")
    assert [trials.find_error(case, H200) for _ in range(3)] == ["no"] * 3 and calls == ["fp8"]
