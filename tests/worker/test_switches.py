"""Switches that a case could leave to the next are named and put back."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from fp8bench.registry import precisions
from fp8bench.worker.switches import SwitchesChanged, _now, unchanged

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
    "autocast": (lambda: torch.set_autocast_enabled("cpu", True), "autocast on cpu at True (it was False)"),
    "anomaly": (lambda: torch.set_anomaly_enabled(True), "anomaly detection at True (it was False)"),
    "denormals": (lambda: torch.set_flush_denormal(True), "denormals as zero at True (it was False)"),
}


@pytest.mark.parametrize("which", LEFT)
def test_what_is_left_changed_is_named_and_put_back(which: str) -> None:
    """The next case finds it as it was."""
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
    with unchanged(), precisions.get(name).scope(), torch.no_grad(), torch.autocast("cpu"):
        torch.rand(3)
