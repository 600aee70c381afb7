"""What a GPU will be given, without one: whole steps at a GPU's sizes on tensors without memory, by torch's CUDA rules.

The rules are those of layouts, of multiples and of scales. Operations that wait for the device's values fail, as there
are none. Of speed, and of what cuBLAS takes, nothing is said here.
"""

from __future__ import annotations

import contextlib
import importlib
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from fp8bench.model import CELL_PHASES, Case, DeviceFacts, Request
from fp8bench.model.raw import Settings
from fp8bench.plan.corpus import Corpus, prepare_corpus
from fp8bench.plan.make import make_plan
from fp8bench.protocols import SilentPhases, Stamper
from fp8bench.registry import precisions, workloads
from fp8bench.worker.bench import Bench
from fp8bench.worker.clock import PhaseClock

H200 = DeviceFacts("cuda", 0, "NVIDIA H200", 150_121_545_728, "2.13.0+cu130", (9, 0), "13.0", None, "sm_90")
MODES = (
    "fp32", "tf32", "bf16", "fp16", "fp8", "fp8:gw=bf16", "fp8-delayed", "fp8-rowwise", "fp8-rowwise:formats=hybrid",
    "fp8-e4m3",
)  # fmt: skip
AXES = {
    "gemm": (("shape", ("4096", "1x8192x8192", "llama3-8b")),),
    "mlp": (),
    "attention": (("sequence", ("1024",)), ("part", ("layer",))),
    "transformer": (),
}
NO_KERNEL = ("aten::empty", "aten::detach")


QUICK = [(name, mode) for name in AXES for mode in MODES if name != "transformer" or mode in ("bf16", "fp8")]
SLOW = [("transformer", mode) for mode in MODES if mode not in ("bf16", "fp8")]


class Ledger(TorchDispatchMode, Stamper):
    """Counts kernels and native products. As a clock it tells kernels, not time."""

    def __init__(self) -> None:
        super().__init__()
        self.kernels = self.products = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name
        view = any(one.alias_info is not None and not one.alias_info.is_write for one in func._schema.returns)
        self.products += name == "aten::_scaled_mm_v2"
        self.kernels += not view and not name.startswith(NO_KERNEL)
        return func(*args, **(kwargs or {}))

    def source(self) -> Callable[[], int]:
        return lambda: self.kernels

    def intervals_ns(self, stamps: Sequence[int]) -> list[int]:
        return [later - earlier for earlier, later in pairwise(stamps)]


class Generator(torch.Generator):
    """Torch has none for tensors without memory."""

    device = torch.device("meta")

    def __new__(cls, device: object) -> Generator:
        return super().__new__(cls, "cpu")


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    return prepare_corpus(None, tmp_path_factory.mktemp("data"))


@pytest.fixture(autouse=True)
def an_h200_without_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Meta tensors under CUDA's rules: fake tensors on CUDA end the process where torch is built for the CPU."""
    monkeypatch.setattr("torch._meta_registrations.device_hint", lambda tensor: "cuda")
    monkeypatch.setattr(DeviceFacts, "key", property(lambda facts: "cpu" if facts.kind == "cpu" else "meta"))
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: tensor)
    monkeypatch.setattr(torch.random, "fork_rng", lambda devices=(): contextlib.nullcontext())
    monkeypatch.setattr(torch, "Generator", Generator)
    optimizer = importlib.import_module("torch.optim.optimizer")
    monkeypatch.setattr(optimizer, "_get_fused_kernels_supported_devices", lambda: ["meta"])


def second_step(bench: Bench, case: Case) -> tuple[Ledger, Counter[str]]:
    """What a step did after the first, and its kernels by phase."""
    workload, ledger = workloads.get(case.workload), Ledger()
    with precisions.get(case.mode).scope():
        state = workload.prepare(bench._setup(case, H200))
        workload.step(state, SilentPhases())
        clock = PhaseClock(ledger)
        with ledger:
            clock.begin()
            workload.step(state, clock)
            codes, stamps = clock.end()
    kernels: Counter[str] = Counter()
    for code, count in zip(codes, ledger.intervals_ns(stamps), strict=True):
        kernels[CELL_PHASES[code]] += count
    return ledger, kernels


@pytest.mark.parametrize(
    ("name", "mode"), [*QUICK, *(pytest.param(*one, marks=pytest.mark.slow) for one in SLOW)]
)  # fmt: skip
def test_steps_are_what_cuda_takes(name: str, mode: str, corpus: Corpus) -> None:
    """No rule is broken and nothing waits; FP8 is multiplied natively, in its phase, and casts are in theirs."""
    bench = Bench(Settings(corpus=corpus.path))
    plan = make_plan(Request(name, (mode,), axes=AXES[name]), (H200,), corpus.identity)
    cases = [one.case for group in plan.groups for one in group.cases if one.runs]
    assert cases
    for case in cases:
        ledger, kernels = second_step(bench, case)
        left_alone = "gw=bf16" in mode and dict(case.params).get("product") == "weight-gradient"
        assert bool(ledger.products) == (mode.startswith("fp8") and not left_alone)
        assert kernels["gemm"] >= max(ledger.products, 1)
        carried = name == "gemm" or mode in ("fp32", "tf32")  # gemm's operands come in the carrier
        assert bool(kernels["cast"]) == (bool(ledger.products) or not carried)
