"""A case's products against those of its reference's step: less, more, and what is told apart."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from fp8bench.analysis.claims import claims_of
from fp8bench.analysis.findings import find
from fp8bench.analysis.tapes import ProductWork, product_work
from fp8bench.model import Label, Record, Tape, Verdict, specs
from fp8bench.protocols import Phases
from tests.counts import for_each
from tests.fakes import MS, record, steady
from tests.tapes import tape_in_phases

TOKENS, WIDTH, HIDDEN = 48, 32, 64
PRODUCT = 2 * TOKENS * WIDTH * HIDDEN
Step = Callable[[Tensor, Tensor, Tensor, Phases], object]


def honest(x: Tensor, up: Tensor, down: Tensor, phase: Phases) -> object:
    with phase.gemm:
        return (x @ up) @ down


def half(x: Tensor, up: Tensor, down: Tensor, phase: Phases) -> object:
    with phase.gemm:
        return (x[: TOKENS // 2] @ up) @ down


def skipped(x: Tensor, up: Tensor, down: Tensor, phase: Phases) -> object:
    with phase.gemm:
        return x @ up


def shared(x: Tensor, up: Tensor, down: Tensor, phase: Phases) -> object:
    return x.relu()


def nothing(x: Tensor, up: Tensor, down: Tensor, phase: Phases) -> object:
    return x


def twice(x: Tensor, up: Tensor, down: Tensor, phase: Phases) -> object:
    honest(x, up, down, phase)
    return honest(x, up, down, phase)


def rotated(x: Tensor, up: Tensor, down: Tensor, phase: Phases) -> object:
    with phase.cast:
        x = x @ torch.eye(WIDTH)
    return honest(x, up, down, phase)


def padded(x: Tensor, up: Tensor, down: Tensor, phase: Phases) -> object:
    with phase.gemm:
        return (torch.cat([x, torch.zeros(16, WIDTH)]) @ up) @ down


def taped(step: Step) -> Tape:
    x, up, down = torch.ones(TOKENS, WIDTH), torch.ones(WIDTH, HIDDEN), torch.ones(HIDDEN, WIDTH)
    return tape_in_phases(lambda phase: step(x, up, down, phase))


def trained(again: bool) -> Tape:
    """A step with a backward pass, that computes its forward pass again, or not."""
    x, up, down = torch.ones(TOKENS, WIDTH), torch.ones(WIDTH, HIDDEN), torch.ones(HIDDEN, WIDTH)
    weights = [one.requires_grad_() for one in (up, down)]

    def block(x: Tensor) -> Tensor:
        return (x @ weights[0]) @ weights[1]

    def step() -> None:
        y = checkpoint(block, x, use_reentrant=False) if again else block(x)
        y.sum().backward()

    return tape_in_phases(lambda phase: step())


@for_each(
    ("step", "did"),
    [(half, "196 kFLOP"), (skipped, "197 kFLOP"), (shared, "0 FLOP"), (nothing, "0 FLOP"), (twice, "786 kFLOP")],
)
def test_a_step_of_other_products_has_no_verdict(step: Step, did: str) -> None:
    """Ten times as fast, with the same work declared."""
    lead = replace(record(steady(10 * MS, 24), "fp32", is_reference=True), tape=taped(honest))
    case = replace(record(steady(MS, 24), "bf16"), tape=taped(step))
    (told,) = [one for one in claims_of(case, lead) if one.label is Label.WORK_MISMATCH]
    assert told.hard and told.reason.endswith(" a step, fp32's do 393 kFLOP"), told.reason
    assert find([lead, case], {})[1].verdict is Verdict.UNSURE


@for_each(
    ("own", "base", "work"),
    [
        (taped(rotated), taped(honest), ProductWork(2 * PRODUCT, rotations=2 * TOKENS * WIDTH * WIDTH)),
        (taped(padded), taped(honest), ProductWork(2 * PRODUCT, padding=2 * PRODUCT // 3)),
        (trained(True), trained(False), None),
    ],
    ids=["rotations", "padding", "recomputed"],
)
def test_what_a_precision_needs_beside_is_told_apart(own: Tape, base: Tape, work: ProductWork | None) -> None:
    """And is no other work; the figures of a case have it."""
    found = product_work(own, base)
    assert found.useful == product_work(base).useful and found == (work or found) and found.apart
    lead = replace(record(steady(10 * MS, 24), "fp32", is_reference=True), tape=base)
    case = replace(record(steady(MS, 24), "bf16"), tape=own)
    assert not [one for one in claims_of(case, lead) if one.label is Label.WORK_MISMATCH]


def test_recomputation_is_that_of_the_forward_pass() -> None:
    """As far as torch goes: nobody asks for the last product again."""
    found = product_work(trained(True), trained(False))
    assert found.apart == {specs.RECOMPUTED_FLOPS: PRODUCT}


def test_a_reference_by_way_of_fp64_leaves_no_verdict() -> None:
    """It is twice as slow for that, and what stands beside it as fast."""

    def wide(x: Tensor, up: Tensor, down: Tensor, phase: Phases) -> object:
        with phase.gemm:
            return ((x.double() @ up.double()) @ down.double()).float()

    lead = replace(record(steady(10 * MS, 24), "fp32", is_reference=True), tape=taped(wide))
    case = replace(record(steady(MS, 24), "bf16"), tape=taped(honest))
    (told,) = claims_of(lead, None)
    assert (told.label, told.reason) == (Label.FALLBACK, "393 kFLOP of its 393 kFLOP a step are in fp64") and told.hard
    assert find([lead, case], {})[1].verdict is Verdict.UNSURE


def test_where_operators_are_unknown_nothing_is_said() -> None:
    lead: Record = replace(record(steady(10 * MS, 24), "fp32", is_reference=True), tape=taped(honest))
    case = replace(record(steady(MS, 24), "bf16"), tape=replace(taped(half), unwritten=1))
    assert not [one for one in claims_of(case, lead) if one.label is Label.WORK_MISMATCH]
