"""Optimizers under audit: a mistake has its name, and steps that keep their promise pass."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

from fp8bench.features.audit.auditor import Shape, audited
from fp8bench.features.audit.operands import dynamic_map, kept
from fp8bench.features.audit.results import VALUE_CHECKS
from fp8bench.features.audit.steps import OptimizerSubject
from fp8bench.features.audit.values import AuditFinding
from fp8bench.user_code.named import signed
from suites.audit import codes_of, result_of
from suites.audit_kernels import Kernel
from suites.audit_optimizers import HONEST, LIES
from tests.counts import for_each
from tests.facts import CPU

# The data on which a mistake shows in a few steps, where that is not "normal".
_ROWS = "rows of different sizes"
DATA = {"epsilon before the bias is corrected": _ROWS, "a float32 second moment": _ROWS}
LATE = "a count of steps in bf16"
SHORT = Shape(16, 6, 256)


def subject(kernel: Kernel) -> OptimizerSubject:
    return OptimizerSubject(kernel.made(), kernel.signature, CPU)


def judged(kernel: Kernel, data: str = "normal", shape: Shape = SHORT) -> AuditFinding:
    audited = subject(kernel)
    matrices = audited.drawn(data, shape, 0)
    return audited.promises(matrices)["update"].judge(audited.results(audited.arguments(matrices))["update"])


@for_each("lie", [kernel for kernel in LIES if kernel.name != LATE], ids=lambda kernel: kernel.name)
def test_a_mistake_has_its_name(lie: Kernel) -> None:
    verdict = judged(lie, DATA.get(lie.name, "normal"))
    assert (verdict.code, verdict.failed) == (lie.code, True)


def test_a_mistake_that_nobody_knows_has_the_wrong_error() -> None:
    class Uneven(torch.optim.AdamW):
        def step(self, closure: object = None) -> None:  # type: ignore[override]
            super().step()
            for weights in self.param_groups[0]["params"]:
                weights.data[:, ::3] *= 1.001

    assert judged(Kernel("", signed("optimizer", "fp32"), Uneven)).code == "too-bad"


@for_each("kernel", [kernel for kernel in HONEST if "torchao" not in kernel.name], ids=lambda kernel: kernel.name)
@for_each("data", ["normal", "many octaves"])
def test_steps_that_keep_their_promise(kernel: Kernel, data: str) -> None:
    assert judged(kernel, data).code == ""


@pytest.mark.slow
@for_each("kernel", [kernel for kernel in HONEST if "torchao" in kernel.name], ids=lambda kernel: kernel.name)
def test_torchaos_do_so_too(kernel: Kernel) -> None:
    for data in OptimizerSubject.data:
        torch.manual_seed(0)  # which torchao rounds by
        assert judged(kernel, data).code == ""


@pytest.mark.slow
def test_a_few_elements_that_are_rounded_at_random_accuse_nobody() -> None:
    """Of one-hot rows sixteen elements make nearly all of the error; at these seeds it was too small, and too large."""
    (kernel,) = (kernel for kernel in HONEST if kernel.name == "torchao's 8-bit AdamW, rounding at random")
    for seed in (121, 167):
        torch.manual_seed(seed)
        assert judged(kernel, "one-hot rows").code == ""


@pytest.mark.slow
@for_each(
    ("rate", "decay", "betas"), [(0.01, 0.3, (0.8, 0.95)), (0.066, 0.016, (0.5, 0.95)), (3.4e-5, 0.0032, (0.9, 0.99))]
)
def test_a_factor_of_decay_in_float32_accuses_nobody(rate: float, decay: float, betas: tuple[float, float]) -> None:
    """torch rounds 1 - rate x decay once, and multiplies by that in each of a thousand steps."""
    made = partial(torch.optim.AdamW, lr=rate, weight_decay=decay, betas=betas)
    assert judged(Kernel("", signed("optimizer", "fp32"), made), shape=OptimizerSubject.many).code == ""


def test_a_few_weights_that_are_shown_on_the_other_side_of_a_tie_accuse_nobody() -> None:
    """At this seed those with a float32 second moment were nearer."""
    (kernel,) = (kernel for kernel in HONEST if kernel.name == "FP8-LM's moments and a master")
    assert codes_of(audited("", kernel.made(), kernel.signature, CPU, 6, VALUE_CHECKS)) == "-"


@pytest.mark.slow
def test_a_count_that_stands_still_shows_in_a_thousand_steps() -> None:
    (lie,) = (kernel for kernel in LIES if kernel.name == LATE)
    audit = result_of(lie, "cpu", [check for check in VALUE_CHECKS if check.name == "many steps"])
    assert codes_of(audit) == "step-count" and "256" in audit.findings[0].why


@for_each(
    ("made", "sentence"),
    [
        (lambda weights: torch.optim.AdamW(weights, lr=0.0), "its learning rate is 0"),
        (lambda weights: torch.optim.AdamW(weights, amsgrad=True), "amsgrad is not audited"),
        (lambda weights: torch.optim.AdamW([{"params": weights, "betas": (0.9, 1)}]), "its betas are 0.9 and 1: each"),
        (list, r"it made list, and step\(\) and param_groups were expected"),
    ],
)
def test_what_no_promise_covers(made: Callable[..., Any], sentence: str) -> None:
    with pytest.raises((ValueError, TypeError), match=sentence):
        judged(Kernel("", signed("optimizer", "fp32"), made))


def test_the_dynamic_map_is_dettmerss() -> None:
    for both in (True, False):
        values = dynamic_map(8, both)
        assert len(values) == 256 and values[-1] == 1 and bool(values[0] < 0) is both
    assert len(dynamic_map(4, True)) == 16 and dynamic_map(4, False)[0] == 1 / 16


@for_each("word", ["dynamic8-256", "e4m3-128", "fp8"])
def test_what_is_left_of_moments(word: str) -> None:
    """Nearest on their grid: twice is once, zero is zero, and half a step of the largest is the most that is lost."""
    x = torch.randn(7, 100, generator=torch.Generator().manual_seed(0))
    cast = kept(word, CPU)
    assert torch.equal(cast(torch.zeros(4, 4)), torch.zeros(4, 4, dtype=torch.float64))
    assert float((cast(x) - x).abs().max()) < float(x.abs().max()) / 16
    assert torch.allclose(cast(cast(x)), cast(x), rtol=1e-6)
