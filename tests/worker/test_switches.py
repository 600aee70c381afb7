"""Switches that a case could leave to the next are named and put back."""

from __future__ import annotations

import ctypes
import gc
import os
import platform
import re
import signal
import subprocess
import sys
import time
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import backends
from torch.overrides import BaseTorchFunctionMode
from torch.utils.flop_counter import FlopCounterMode

from fp8bench.model import Case, Request
from fp8bench.model.raw import Settings
from fp8bench.model.run import SWITCH_PREFIX, SWITCHES_SET
from fp8bench.plan.make import make_plan
from fp8bench.protocols import Phases
from fp8bench.registry import precisions
from fp8bench.user_code.switches import read_values
from fp8bench.worker import step_guards
from fp8bench.worker.bench import Bench
from fp8bench.worker.clock import PhaseStampClock
from fp8bench.worker.switches import (
    SwitchesChanged,
    precision_scope,
    read_recorded_switches,
    restore_switches,
    switches,
)
from fp8bench.workloads.gemm import Gemm
from tests.counts import for_each
from tests.fakes import CPU

_UPWARD = {"x86_64": 0x800, "aarch64": 0x400000}.get(platform.machine(), 0)


def _same(*arguments: Any) -> Any:
    """Does nothing: a hook, a tracer, a profiler."""


CLOCKS = (
    "perf_counter_ns",
    "monotonic",
    "monotonic_ns",
    "process_time",
    "process_time_ns",
    "thread_time",
    "thread_time_ns",
    "time",
    "time_ns",
    "sleep",
)
SIGNALS = ("SIGINT", "SIGTERM", "SIGHUP", "SIGALRM", "SIGVTALRM", "SIGPROF", "SIGUSR2")
LEFT: dict[str, tuple[Callable[[], object], str]] = {
    "dtype": (lambda: torch.set_default_dtype(torch.bfloat16), "the default dtype at torch.bfloat16 (it was torch.fl"),
    "grad": (lambda: torch.set_grad_enabled(False), "gradients at False (it was True)"),
    "no_grad": (lambda: torch.no_grad().__enter__(), "gradients at False (it was True)"),
    "device": (lambda: torch.set_default_device("cpu"), "the default device at cpu (it was None)"),
    "threads": (lambda: torch.set_num_threads(torch.get_num_threads() + 1), "the number of threads at"),
    "products": (lambda: torch.set_float32_matmul_precision("medium"), "float32 products at medium (it was highest)"),
    "conv": (partial(setattr, backends.cudnn, "allow_tf32", False), "cuDNN's TF32 at False (it was True)"),
    "tuning": (partial(setattr, backends.cudnn, "benchmark", True), "cuDNN's benchmark at True (it was False)"),
    "cudnn": (partial(setattr, backends.cudnn, "enabled", False), "cuDNN at False (it was True)"),
    "same": (lambda: torch.use_deterministic_algorithms(True, warn_only=True), "deterministic algorithms at 1"),
    "bf16": (
        partial(setattr, backends.cuda.matmul, "allow_bf16_reduced_precision_reduction", False),
        "bf16's reduced-precision sums at False, True (it was True, True)",
    ),
    "oneDNN": (partial(setattr, backends.mkldnn, "enabled", False), "oneDNN at False (it was True)"),
    "its products": (
        partial(setattr, backends.mkldnn.matmul, "fp32_precision", "bf16"),
        "float32 products at mixed (it was highest), oneDNN's float32 products at bf16",
    ),
    "its convolutions": (
        partial(setattr, backends.mkldnn.conv, "fp32_precision", "bf16"),
        "oneDNN's float32 convolutions at bf16",
    ),
    "new and old": (
        partial(setattr, backends.cudnn.conv, "fp32_precision", "ieee"),
        "cuDNN's TF32 at mixed (it was True), cuDNN's float32 convolutions at ieee",
    ),
    "all backends": (partial(setattr, backends, "fp32_precision", "ieee"), "float32 of all backends at ieee"),
    "flash": (lambda: backends.cuda.enable_flash_sdp(False), "flash attention at False (it was True)"),
    "math": (lambda: backends.cuda.enable_math_sdp(False), "attention in plain products at False"),
    "efficient": (lambda: backends.cuda.enable_mem_efficient_sdp(False), "memory-efficient attention at False"),
    "cuDNN's": (lambda: backends.cuda.enable_cudnn_sdp(False), "cuDNN's attention at False (it was True)"),
    "same cuDNN": (partial(setattr, backends.cudnn, "deterministic", True), "cuDNN's deterministic algorithms at"),
    "same oneDNN": (partial(setattr, backends.mkldnn, "deterministic", True), "oneDNN's deterministic algorithms"),
    "garbage": (gc.disable, "garbage collection at False (it was True)"),
    "processors": (lambda: os.sched_setaffinity(0, {min(os.sched_getaffinity(0))}), "the processors at "),
    "environment": (lambda: os.environ.update(OMP_WAIT_POLICY="active"), "the environment at "),
    "clock": (lambda: setattr(time, "perf_counter", time.time), "time.perf_counter at time.time (it was time.perf_cou"),
    "profiling timer": (lambda: signal.setitimer(signal.ITIMER_PROF, 1000), "the profiling timer at True (it was F"),
    **{
        name: (partial(setattr, time, name, max), f"time.{name} at builtins.max (it was time.{name})")
        for name in CLOCKS
    },
    **{
        name: (partial(signal.signal, signal.Signals[name], signal.SIG_IGN), f"the handler of {name} at SIG_IGN (it w")
        for name in SIGNALS
    },
    "signal": (lambda: signal.signal(signal.SIGUSR1, signal.SIG_IGN), "the handler of SIGUSR1 at SIG_IGN (it was SIG_"),
    "timer": (lambda: signal.setitimer(signal.ITIMER_VIRTUAL, 1000), "the virtual timer at True (it was False)"),
    "autocast": (lambda: torch.set_autocast_enabled("cpu", True), "autocast on cpu at True (it was False)"),
    "anomaly": (lambda: torch.set_anomaly_enabled(True), "anomaly detection at True (it was False)"),
    "locked": (backends.disable_global_flags, "torch's lock on its flags at True (it was False)"),
    "locked and set": (
        lambda: (setattr(backends.mkldnn, "enabled", False), backends.disable_global_flags()),
        "torch's lock on its flags at True (it was False), oneDNN at False (it was True)",
    ),
    "saved": (lambda: torch.autograd.graph.saved_tensors_hooks(_same, _same).__enter__(), "hooks of saved tensors at "),
    "autocast dtype": (lambda: torch.set_autocast_dtype("cpu", torch.float16), "the dtype of autocast on cpu at torch"),
    "autocast cache": (lambda: torch.set_autocast_cache_enabled(False), "the cache of autocast at False (it was True)"),
    "backward": (lambda: torch.autograd.set_multithreading_enabled(False), "autograd's threads at False (it was True)"),
    "filling": (
        lambda: setattr(torch.utils.deterministic, "fill_uninitialized_memory", False),
        "the filling of new memory at F",
    ),
    "limit": (partial(setattr, backends.miopen, "immediate", True), "MIOpen's immediate mode at True"),
    "engine": (partial(setattr, backends.quantized, "engine", "onednn"), "the engine of quantised operators at onednn"),
    "einsum": (partial(setattr, backends.opt_einsum.m, "enabled", True), "the path finder of einsum at True"),
    "NNPACK": (lambda: backends.nnpack.set_flags(False), "NNPACK at False (it was True)"),
    "native": (
        lambda: (
            backends.python_native.disable_operations("scaled_mm"),
            setattr(backends.python_native.triton, "enabled", False),
            backends.python_native.disable_dispatch_keys("CPU"),
        ),
        "operators in Python's kernel languages at language, triton, operator, scaled_mm, device, CPU (it was none)",
    ),
    "order": (
        lambda: torch._C._set_sdp_priority_order([0, 1, 2, 3, 4]),
        "the order of attention's kernels at 0, 1, 2, 3, 4 (it was 1, 2, 0, 3, 4)",
    ),
    "sums": (lambda: backends.cuda.allow_fp16_bf16_reduction_math_sdp(True), "reduced-precision sums in attention at"),
    "depthwise": (partial(setattr, backends.cudnn, "depthwise_kernel", "cudnn"), "cuDNN's depthwise kernel at cudnn"),
    "rocm": (lambda: backends.cuda.preferred_rocm_fa_library("ck"), "the library of attention on ROCm at _ROC"),
    "path": (partial(setattr, backends.opt_einsum.m, "strategy", "optimal"), "the strategy of einsum at optimal"),
    "fp16": (
        partial(setattr, backends.cuda.matmul, "allow_fp16_reduced_precision_reduction", (False, False)),
        "fp16's reduced-precision sums at False, False (it was True, True)",
    ),
    "autocast on a GPU": (lambda: torch.set_autocast_enabled("cuda", True), "autocast on cuda at True (it was False)"),
    "its dtype": (lambda: torch.set_autocast_dtype("cuda", torch.bfloat16), "the dtype of autocast on cuda at torch.b"),
    "recurrences": (
        partial(setattr, backends.mkldnn.rnn, "fp32_precision", "bf16"),
        "oneDNN's float32 recurrences at bf16",
    ),
    "recurrences on CUDA": (
        partial(setattr, backends.cudnn.rnn, "fp32_precision", "ieee"),
        "cuDNN's TF32 at mixed (it was True), cuDNN's float32 recurrences at ieee",
    ),
    "CUDA's": (
        partial(setattr, backends.cuda.matmul, "fp32_precision", "tf32"),
        "float32 products at mixed (it was highest), CUDA's float32 products at tf32",
    ),
    "encoders": (lambda: backends.mha.set_fastpath_enabled(False), "the fast path of encoders at False"),
    "hooks": (lambda: torch.nn.modules.module.register_module_forward_hook(_same), "hooks of all modules at none, non"),
    "accumulators": (
        partial(setattr, backends.cuda.matmul, "allow_fp16_accumulation", True),
        "fp16's accumulators at True",
    ),
    "convolutions on CUDA": (
        partial(setattr, backends.cudnn, "fp32_precision", "ieee"),
        "float32 on CUDA at ieee (it was none)",
    ),
    "oneDNN's own": (lambda: torch._C._set_fp32_precision_setter("mkldnn", "all", "bf16"), "float32 in oneDNN at bf16"),
    "thresholds": (lambda: gc.set_threshold(5, 5, 5), "the thresholds of garbage collection at 5, 5, 5 (it was 700, "),
    "tracer": (lambda: sys.settrace(_same), "the tracer at tests.worker.test_switches._same (it was None)"),
    "profiler": (lambda: sys.setprofile(_same), "the profiler of calls at tests.worker.test_switches._same"),
    "allocations": (tracemalloc.start, "tracing of allocations at True (it was False)"),
    "interval": (lambda: sys.setswitchinterval(1.0), "the interpreter's switch interval at 1.0 (it was 0.005)"),
    "rounding": (lambda: ctypes.CDLL(None).fesetround(_UPWARD), "the rounding of floats at "),
    "denormals": (lambda: torch.set_flush_denormal(True), "denormals as zero at True (it was False)"),
}


# The subset that this torch has.
SINCE_2_12 = {
    "native": hasattr(torch.backends, "python_native"),
    "depthwise": hasattr(torch.backends.cudnn, "depthwise_kernel"),
}


@contextmanager
def _other_code() -> Iterator[None]:
    kept = PhaseStampClock.begin.__code__
    PhaseStampClock.begin.__code__ = (lambda clock: None).__code__
    yield
    PhaseStampClock.begin.__code__ = kept


# Contexts that other code entered and keeps: they cannot be left from outside.
KEPT: dict[str, tuple[Callable[[], Any], str]] = {
    "inference": (torch.inference_mode, "inference mode at True (it was False, and cannot be put back)"),
    "functions": (BaseTorchFunctionMode, "modes of torch's functions at 1 (it was 0, and cannot be put back)"),
    "functions of ours": (
        partial(patch.object, PhaseStampClock, "end", lambda clock: ([], [])),
        "fp8bench's own functions at fp8bench.worker.clock.PhaseStampClock.end (it was none, and cannot be put back)",
    ),
    "their code": (
        _other_code,
        "fp8bench's own functions at fp8bench.worker.clock.PhaseStampClock.begin (it was none, and cannot be put back)",
    ),
    "operators": (FlopCounterMode, "modes of torch's dispatcher at 1 (it was 0, and cannot be put back)"),
    "profiler": (
        partial(torch.profiler.profile, acc_events=True),
        "torch's profiler at True (it was False, and cannot be put back)",
    ),
}
# Switches that are not set here, and why.
NOT_HERE = {
    "the working directory": "a test of its own",
    "niceness": "only the superuser takes back what made a process nicer",
    "the scheduling policy": "the superuser's to set",
    "the number of interop threads": "to be set once in a process",
    "cuDNN's limit of benchmarks": "of builds for CUDA",
    "the library of linear algebra": "of builds for CUDA",
    "the library of products on a GPU": "of builds for CUDA",
    "the implementation of flash attention": "there is none to choose from",
    "the real timer": "the limits of these tests run on it",
    "the stance of torch.compile": "a test of its own, which imports the compiler",
    "the default backend of torch.compile": "a test of its own, which imports the compiler",
}


@pytest.mark.parametrize("which", LEFT)
def test_what_is_left_changed_is_named_and_put_back(which: str) -> None:
    if which == "processors" and len(os.sched_getaffinity(0)) < 2:
        pytest.skip("there is one processor, and no other to leave")
    if which == "rounding" and not _UPWARD:
        pytest.skip("how this processor is told to round up is not known")
    if which in SINCE_2_12 and not SINCE_2_12[which]:
        pytest.skip("this torch does not have it; 2.12 has")
    leave, words = LEFT[which]
    before = read_values(switches())
    with pytest.raises(SwitchesChanged) as caught, restore_switches():
        leave()
    assert words in str(caught.value)
    assert read_values(switches()) == before


def test_niceness_is_that_of_this_process() -> None:
    program = (
        "import os\nfrom fp8bench.user_code.switches import list_process_switches\nos.nice(3)\n"
        "print({switch.name: switch.read() for switch in list_process_switches()}['niceness'])\n"
    )
    printed = subprocess.run([sys.executable, "-c", program], capture_output=True, check=True).stdout
    assert int(printed) == min(os.nice(0) + 3, 19)


@for_each("which", KEPT)
def test_a_switch_that_cannot_be_put_back_is_reported_as_such(which: str) -> None:
    make, words = KEPT[which]
    kept = make()
    try:
        with pytest.raises(SwitchesChanged, match=re.escape(words)), restore_switches():
            kept.__enter__()
    finally:
        kept.__exit__(None, None, None)


def test_every_switch_is_left_changed_by_a_test() -> None:
    """A watch on a switch is untested without such a test."""
    planted = " ".join(words for _, words in [*LEFT.values(), *KEPT.values()])
    names = [switch.name for switch in switches()]
    assert len(set(names)) == len(names)
    assert [name for name in names if name not in planted and name not in NOT_HERE] == []


def test_what_is_recorded_are_plain_values_and_one_text_of_what_is_unusual() -> None:
    torch.backends.mkldnn.enabled = False
    try:
        found = read_recorded_switches()
    finally:
        torch.backends.mkldnn.enabled = True
    assert found["switch oneDNN"] is False and found["switch the default dtype"] == "torch.float32"
    assert "oneDNN at False (usually True)" in str(found[SWITCHES_SET]).split("; ")
    assert all(value is None or type(value) in (bool, int, float, str) for value in found.values())
    assert not any(" at 0x" in str(value) for value in found.values())
    kept = {name.removeprefix(SWITCH_PREFIX) for name in found if name != SWITCHES_SET}
    assert kept == {switch.name for switch in switches()} - {"the working directory", "the environment"}


def test_several_are_all_named_and_put_back_although_an_exception_passes() -> None:
    def leave(error: type[Exception] | None = None) -> None:
        torch.set_default_dtype(torch.float64)
        torch.set_grad_enabled(False)
        if error is not None:
            raise error

    with (
        pytest.raises(SwitchesChanged, match=r"it left gradients .*, the default dtype .*: other cases"),
        restore_switches(),
    ):
        leave()
    with pytest.raises(MemoryError), restore_switches():
        leave(MemoryError)
    assert torch.get_default_dtype() is torch.float32 and torch.is_grad_enabled()


def test_a_users_precision_has_to_put_back_what_it_sets() -> None:
    class Careless(type(precisions.get("fp32"))):  # type: ignore[misc]
        @contextmanager
        def scope(self) -> Iterator[None]:
            torch.backends.mkldnn.enabled = False
            yield

    before = read_values(switches())
    with pytest.raises(SwitchesChanged, match="it left oneDNN at False"), precision_scope(Careless()):
        assert not torch.backends.mkldnn.enabled
    assert read_values(switches()) == before


@for_each("precision", ["fp32", "bf16"])
def test_a_switch_of_the_precision_is_watched(precision: str, bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    step = Gemm.step

    def careless(self: Gemm, state: Any, phase: Phases) -> None:
        step(self, state, phase)
        torch.set_float32_matmul_precision("medium")

    monkeypatch.setattr(Gemm, "step", careless)
    params = (("m", 64), ("n", 64), ("k", 64), ("product", "forward"), ("operands", "cast"))
    with pytest.raises(SwitchesChanged, match="it left float32 products at medium"):
        bench.prepare("careless", Case("gemm", params, precision, "cpu"), CPU)
    assert torch.get_float32_matmul_precision() == "highest"


@for_each("everything", [False, True])
def test_a_switch_that_changes_between_slots_is_named_later(monkeypatch: pytest.MonkeyPatch, everything: bool) -> None:
    """In fp8bench's process only its workloads could have done that; in a user's process, the user may."""
    monkeypatch.setattr(step_guards, "_owns_process", everything)
    bench = Bench(Settings())
    request = Request("gemm", ("fp32",), ("cpu",), axes=(("shape", ("64",)),))
    bench.prepare("a", make_plan(request, (CPU,)).groups[0].cases[0].case, CPU)
    bench.slot("a", 1, 0)
    torch.set_default_dtype(torch.float64)
    try:
        if everything:
            with pytest.raises(SwitchesChanged, match=r"the default dtype at torch\.float64 \(it was torch\.float32"):
                bench.slot("a", 1, 0)
            assert torch.get_default_dtype() is torch.float32
        bench.slot("a", 1, 0)
    finally:
        torch.set_default_dtype(torch.float32)
        bench.close()
