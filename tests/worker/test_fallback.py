"""Short precisions that do not compute what they promise, through a real worker: each is labelled."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from fp8bench.analysis.findings import findings
from fp8bench.model import Case, Label, Products, Run, Verdict
from fp8bench.worker import products
from fp8bench.worker.bench import Bench
from tests.facts import CPU, H200
from tests.nn.test_scaled_arithmetic import NEEDS_PRODUCTS
from tests.own_suites import suite_run

pytestmark = pytest.mark.usefixtures("short_slots")

# All claim to be fp8 with one scale per tensor. The native ones claim that torch's CPU kernels are hardware.
PRECISIONS = """
import torch

from fp8bench.model import Level, Support
from fp8bench.nn.arithmetics import RecipeArithmetic, ScaledArithmetic
from fp8bench.protocols import Operand
from fp8bench.registry import precisions

Base = type(precisions.get("fp8-e4m3"))


def promise(name, level, base, **methods):
    arithmetic = type("Promised", (base,), methods)
    body = {
        "name": name, "summary": name, "aliases": (), "support": lambda self, facts: Support(level, "planted"),
        "arithmetic": lambda self, facts: arithmetic(self.recipe),
    }
    precisions.register(name)(type("Planted", (Base,), body))


def leaves(self, tensor, role):
    return Operand(tensor.detach().bfloat16())


def turns(self, operand):
    return Operand(operand.data.t())


def wide(self, a, b, dtype):
    return torch.mm(a.data.bfloat16(), b.data.bfloat16().t()).to(dtype)


def restored(self, a, b, dtype):
    a, b = (self.restore(one, torch.bfloat16) for one in (a, b))
    return torch.mm(a, b.t()).to(dtype)


def remembers(self, tensor, role, again):
    operand = RecipeArithmetic.operand(self, tensor, role, again)
    operand.data.source = tensor.detach()
    return operand


def pretends(self, a, b, dtype):
    RecipeArithmetic.product(self, a, b, dtype)
    return torch.mm(a.data.source, b.data.source.t()).to(dtype)


native, emulated = Level.NATIVE, Level.EMULATED
promise("honest-native", native, ScaledArithmetic)
promise("honest-emulated", emulated, RecipeArithmetic)
promise("copies-emulated", emulated, RecipeArithmetic, product=wide)
promise("leaves-native", native, ScaledArithmetic, cast=leaves, cast_transpose=leaves, transpose=turns, product=wide)
promise("leaves-emulated", emulated, RecipeArithmetic, cast=leaves, cast_transpose=leaves, product=wide)
promise("copies-native", native, ScaledArithmetic, product=restored)
promise("pretends-emulated", emulated, RecipeArithmetic, operand=remembers, product=pretends)
"""
HONEST = ("honest-native", "honest-emulated", "copies-emulated")
# The label of each.
FALLBACKS = {
    "leaves-native": "1 product, of bfloat16: none has an operand of leaves-native's formats",
    "leaves-emulated": "1 product, of bfloat16: none has an operand of leaves-emulated's formats",
    "copies-native": "1 product, of bfloat16: operands with values of copies-native's formats, but not as its codes",
    "pretends-emulated": "the numbers of a product are those of bfloat16",
}
AXES = (("shape", ("128",)), ("product", ("forward",)), ("operands", ("cast",)))


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    modes = ("bf16", *HONEST, *FALLBACKS)
    asked = {"reference": "bf16", "axes": AXES, "rounds": 4, "energy": False}
    with suite_run(tmp_path_factory, PRECISIONS, "gemm", modes, **asked) as run:
        yield run


def reasons(run: Run) -> dict[str, str]:
    return {
        finding.case.mode: dict(finding.label_reasons).get(Label.FALLBACK, "") for finding in findings(run).values()
    }


def test_each_fallback_is_labelled_with_what_it_ran_and_an_honest_case_is_not(run: Run) -> None:
    assert reasons(run) == {**dict.fromkeys(("bf16", *HONEST), ""), **FALLBACKS}
    for finding in findings(run).values():
        if finding.case.mode in FALLBACKS:
            assert Label.FALLBACK in finding.labels and finding.verdict in (Verdict.UNSURE, Verdict.EMULATED)


@pytest.mark.parametrize(
    ("mode", "wanted"),
    [
        pytest.param("honest-native", Products(1, True, ("float8_e4m3fn",), 3), marks=NEEDS_PRODUCTS),
        ("copies-native", Products(1, True, ("bfloat16",), 11, wide=True, looks_like="bfloat16 copies of {}'s values")),
    ],
)
def test_what_is_kept_of_it(mode: str, wanted: Products, run: Run, bench: Bench) -> None:
    params = (("m", 128), ("n", 128), ("k", 128), ("product", "forward"), ("operands", "ready"))
    found = bench.products(Case("gemm", params, mode, "cpu"), CPU)
    assert found.wide == wanted.wide and found.looks_like == wanted.looks_like.format(mode)
    assert found.low and found.operands == wanted.operands and found.kernels == ()


def test_kernels_of_a_profiled_step_are_those_that_multiply(monkeypatch: pytest.MonkeyPatch) -> None:
    names = ("nvjet_tst_128x256", "vectorized_elementwise_kernel", "nvjet_tst_128x256", "nvjet_qqtst_64x8")
    events = [{"cat": "kernel", "name": name} for name in names] + [{"cat": "cpu_op", "name": "aten::mm gemm bf16"}]
    monkeypatch.setattr(products, "record_trace", lambda run, kind: {"traceEvents": events})
    assert products._list_multiplying_kernels(lambda phases: None, H200) == ("nvjet_tst_128x256", "nvjet_qqtst_64x8")
    assert products._list_multiplying_kernels(lambda phases: None, CPU) == ()

    def silent(run: object, kind: str) -> None:
        raise RuntimeError("torch's profiler recorded nothing")

    monkeypatch.setattr(products, "record_trace", silent)
    assert products._list_multiplying_kernels(lambda phases: None, H200) == ()
