"""Switches that a case could leave to the next are named and put back."""

from __future__ import annotations

import gc
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from fp8bench.model import Case
from fp8bench.protocols import Phases
from fp8bench.registry import precisions
from fp8bench.worker.bench import Bench
from fp8bench.worker.switches import SwitchesChanged, _now, unchanged
from fp8bench.workloads.gemm import Gemm
from tests.fakes import CPU

LEFT: dict[str, tuple[Callable[[], object], str]] = {
    "dtype": (lambda: torch.set_default_dtype(torch.bfloat16), "the default dtype at torch.bfloat16 (it was torch.fl"),
    "grad": (lambda: torch.set_grad_enabled(False), "gradients at False (it was True)"),
    "no_grad": (lambda: torch.no_grad().__enter__(), "gradients at False (it was True)"),
    "device": (lambda: torch.set_default_device("cpu"), "the default device at cpu (it was None)"),
    "threads": (lambda: torch.set_num_threads(torch.get_num_threads() + 1), "the number of threads at"),
    "products": (lambda: torch.set_float32_matmul_precision("medium"), "float32 products at medium (it was highest)"),
    "conv": (lambda: setattr(torch.backends.cudnn, "allow_tf32", False), "cuDNN's TF32 at False (it was True)"),
    "tuning": (lambda: setattr(torch.backends.cudnn, "benchmark", True), "cuDNN's benchmark at True (it was False)"),
    "cudnn": (lambda: setattr(torch.backends.cudnn, "enabled", False), "cuDNN at False (it was True)"),
    "same": (lambda: torch.use_deterministic_algorithms(True, warn_only=True), "deterministic algorithms at 1"),
    "bf16": (
        lambda: setattr(torch.backends.cuda.matmul, "allow_bf16_reduced_precision_reduction", False),
        "bf16's reduced-precision sums at False (it was True)",
    ),
    "oneDNN": (lambda: setattr(torch.backends.mkldnn, "enabled", False), "oneDNN at False (it was True)"),
    "its products": (
        lambda: setattr(torch.backends.mkldnn.matmul, "fp32_precision", "bf16"),
        "float32 products at mixed (it was highest), oneDNN's float32 products at bf16",
    ),
    "its convolutions": (
        lambda: setattr(torch.backends.mkldnn.conv, "fp32_precision", "bf16"),
        "oneDNN's float32 convolutions at bf16",
    ),
    "new and old": (
        lambda: setattr(torch.backends.cudnn.conv, "fp32_precision", "ieee"),
        "cuDNN's TF32 at mixed (it was True)",
    ),
    "all backends": (lambda: setattr(torch.backends, "fp32_precision", "ieee"), "float32 of all backends at ieee"),
    "flash": (lambda: torch.backends.cuda.enable_flash_sdp(False), "flash attention at False (it was True)"),
    "math": (lambda: torch.backends.cuda.enable_math_sdp(False), "attention in plain products at False"),
    "efficient": (lambda: torch.backends.cuda.enable_mem_efficient_sdp(False), "memory-efficient attention at False"),
    "cuDNN's": (lambda: torch.backends.cuda.enable_cudnn_sdp(False), "cuDNN's attention at False (it was True)"),
    "same cuDNN": (lambda: setattr(torch.backends.cudnn, "deterministic", True), "cuDNN's deterministic algorithms at"),
    "same oneDNN": (lambda: setattr(torch.backends.mkldnn, "deterministic", True), "oneDNN's deterministic algorithms"),
    "garbage": (gc.disable, "garbage collection at False (it was True)"),
    "processors": (lambda: os.sched_setaffinity(0, {min(os.sched_getaffinity(0))}), "the processors at {"),
    "environment": (lambda: os.environ.update(OMP_WAIT_POLICY="active"), "the environment at {"),
    "clock": (lambda: setattr(time, "perf_counter", time.time), "time.perf_counter at <built-in function time>"),
    "signal": (lambda: signal.signal(signal.SIGUSR1, signal.SIG_IGN), "the handler of SIGUSR1 at 1 (it was 0)"),
    "timer": (lambda: signal.setitimer(signal.ITIMER_VIRTUAL, 1000), "the virtual timer at True (it was False)"),
    "autocast": (lambda: torch.set_autocast_enabled("cpu", True), "autocast on cpu at True (it was False)"),
    "anomaly": (lambda: torch.set_anomaly_enabled(True), "anomaly detection at True (it was False)"),
    "denormals": (lambda: torch.set_flush_denormal(True), "denormals as zero at True (it was False)"),
}


@pytest.mark.parametrize("which", LEFT)
def test_what_is_left_changed_is_named_and_put_back(which: str) -> None:
    """The next case finds it as it was."""
    if which == "processors" and len(os.sched_getaffinity(0)) < 2:
        pytest.skip("there is one processor, and no other to leave")
    leave, words = LEFT[which]
    before = _now()
    with pytest.raises(SwitchesChanged) as caught, unchanged():
        leave()
    assert f"it left {words}" in str(caught.value)
    assert _now() == before


def test_the_working_directory_is_one(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A relative path would mean another file. One whose folder is gone has no way back."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "below").mkdir()
    with pytest.raises(SwitchesChanged, match=r"it left the working directory at .*below "), unchanged():
        monkeypatch.chdir(tmp_path / "below")
    assert Path.cwd() == tmp_path


def test_what_torch_itself_writes_into_the_environment_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """Inductor says there where its cache lies, CUDA how it loads; no worker's first step may fail for that."""
    with unchanged():
        monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "somewhere")
        monkeypatch.setenv("CUDA_MODULE_LOADING", "LAZY")


def test_a_timer_that_has_ended_is_not_wound_up_again() -> None:
    """It would end the process a second later."""
    signal.setitimer(signal.ITIMER_VIRTUAL, 1000)
    with pytest.raises(SwitchesChanged, match=r"the virtual timer at False \(it was True\)"), unchanged():
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
    assert not any(signal.getitimer(signal.ITIMER_VIRTUAL))


def test_several_are_all_named() -> None:
    """In one sentence."""

    def leave() -> None:
        torch.set_default_dtype(torch.float64)
        torch.set_grad_enabled(False)

    with pytest.raises(SwitchesChanged, match=r"it left gradients .*, the default dtype .*: other cases"), unchanged():
        leave()
    assert torch.get_default_dtype() is torch.float32 and torch.is_grad_enabled()


def test_an_exception_is_not_hidden_and_switches_are_put_back_all_the_same() -> None:
    """After exhausted memory the process goes on."""

    def leave() -> None:
        torch.set_grad_enabled(False)
        raise MemoryError

    with pytest.raises(MemoryError), unchanged():
        leave()
    assert torch.is_grad_enabled()


@pytest.mark.parametrize("name", precisions.names())
def test_a_precisions_own_switches_are_restored_by_its_scope(name: str) -> None:
    """And what torch puts back itself is no trespass; nor is drawing random numbers."""
    before = torch.get_float32_matmul_precision(), torch.get_default_dtype()
    with unchanged(), torch.no_grad(), torch.autocast("cpu"):
        torch.rand(3)
    with precisions.get(name).scope():
        torch.rand(3)
    assert (torch.get_float32_matmul_precision(), torch.get_default_dtype()) == before


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_switch_that_the_precision_sets_too_is_watched(
    precision: str, bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is put back after a step, which hid that the step had changed it."""
    step = Gemm.step

    def careless(self: Gemm, state: Any, phase: Phases) -> None:
        step(self, state, phase)
        torch.set_float32_matmul_precision("medium")

    monkeypatch.setattr(Gemm, "step", careless)
    params = (("m", 64), ("n", 64), ("k", 64), ("product", "forward"), ("operands", "cast"))
    with pytest.raises(SwitchesChanged, match="it left float32 products at medium"):
        bench.prepare("careless", Case("gemm", params, precision, "cpu"), CPU)
    assert torch.get_float32_matmul_precision() == "highest"
