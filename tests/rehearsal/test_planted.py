"""The rehearsal sees what it is there for: each fault is planted, and found."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.nn.functional import ScalingType

from fp8bench.formats import operators
from fp8bench.model import Case, DeviceFacts
from fp8bench.nn.arithmetics import ScaledArithmetic
from fp8bench.nn.block_arithmetic import BlockArithmetic
from fp8bench.protocols import Operand, Role
from fp8bench.registry import precisions
from tests.facts import B200, H200, MI300X
from tests.rehearsal.ceilings import of_cast, of_casts
from tests.rehearsal.stage import Stage

GEMM = (("m", 64), ("n", 64), ("k", 64), ("product", "forward"), ("operands", "cast"))
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2


def product(a: torch.dtype, b: torch.dtype, kind: ScalingType, output: torch.dtype = torch.bfloat16) -> None:
    x, y = (torch.empty(64, 64, dtype=one, device="meta") for one in (a, b))
    scale = torch.ones((64, 1) if kind is ScalingType.RowWise else (), device="meta")
    torch.ops.aten._scaled_mm_v2.default(
        x, y.t(), [scale], [kind.value], [], [scale.t()], [kind.value], [], None, output, [], False
    )


def step(stage: Stage, facts: DeviceFacts = H200, **params: int | str) -> None:
    arguments = tuple({**dict(GEMM), **params}.items())
    stage.second_step(Case("gemm", arguments, "fp8", facts.key), facts)


def test_what_is_right_passes(stage: Stage) -> None:
    step(stage)
    with stage.ledger(H200):
        product(E5M2, E4M3, ScalingType.TensorWise, torch.float32)
        product(E4M3, E5M2, ScalingType.RowWise, torch.float32)


@pytest.mark.parametrize(("place", "fault"), [(0, "self must be row_major"), (1, "mat2 must be col_major")])
def test_an_operand_in_the_wrong_layout(place: int, fault: str, stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    right = ScaledArithmetic.product

    def wrong(self: ScaledArithmetic, a: Operand, b: Operand, dtype: torch.dtype) -> Tensor:
        operands = [a, b]
        operands[place] = replace(operands[place], data=operands[place].data.t().contiguous().t())
        return right(self, *operands, dtype)

    monkeypatch.setattr(ScaledArithmetic, "product", wrong)
    with pytest.raises(RuntimeError, match=fault):
        step(stage)


@pytest.mark.parametrize("side", ["k", "n"])
def test_a_side_that_is_no_multiple(side: str, stage: Stage) -> None:
    with pytest.raises(RuntimeError, match="divisible by 16"):
        step(stage, **{side: 24})


@pytest.mark.parametrize(
    ("facts", "a", "b", "kind", "output", "reason"),
    [
        (H200, E5M2, E5M2, ScalingType.TensorWise, torch.bfloat16, "two E5M2 operands"),
        (B200, E5M2, E5M2, ScalingType.TensorWise, torch.bfloat16, "two E5M2 operands"),
        (B200, E4M3, E5M2, ScalingType.RowWise, torch.bfloat16, "the second operand is E4M3"),
        (B200, E4M3, E4M3, ScalingType.RowWise, torch.float32, "the output is bf16 or fp16"),
        (MI300X, E4M3, E4M3, ScalingType.TensorWise, torch.bfloat16, "e4m3fnuz"),
    ],
)
def test_products_that_a_device_has_not(
    facts: DeviceFacts,
    a: torch.dtype,
    b: torch.dtype,
    kind: ScalingType,
    output: torch.dtype,
    reason: str,
    stage: Stage,
) -> None:
    product(a, b, kind, output)
    with pytest.raises(AssertionError, match=reason), stage.ledger(facts):
        product(a, b, kind, output)


def test_fast_sums_under_scales_of_blocks(stage: Stage) -> None:
    x, y = (torch.empty(128, 128, dtype=E4M3, device="meta") for _ in range(2))
    scale = torch.ones(1, 128, device="meta").t()
    kind = [ScalingType.BlockWise1x128.value]
    arguments = x, y.t(), [scale], kind, [], [scale], kind, [], None, torch.bfloat16, []
    with stage.ledger(H200):
        torch.ops.aten._scaled_mm_v2.default(*arguments, False)
        with pytest.raises(AssertionError, match="never fast"):
            torch.ops.aten._scaled_mm_v2.default(*arguments, True)


@pytest.mark.parametrize(
    "wait",
    [
        lambda x: x.amax().item(),
        lambda x: bool(x.isfinite().all()),
        lambda x: x.nonzero(),
        lambda x: x[x > 0],
        lambda x: torch.equal(x, x),
        lambda x: x.cpu(),
        lambda x: x.tolist(),
        lambda x: torch.tensor([1.0]).to("meta"),
        lambda x: torch.tensor([1.0]).to("meta", non_blocking=True),
        lambda x: torch.tensor([1.0]).pin_memory().to("meta"),
        lambda x: x.copy_(torch.ones(64)),
        lambda x: torch.tensor(1.0, device="meta"),
    ],
)
def test_a_wait(wait: Callable[[Tensor], object], stage: Stage) -> None:
    x = torch.ones(64, device="meta")
    with pytest.raises((AssertionError, RuntimeError, NotImplementedError)), stage.ledger(H200):
        wait(x)


def test_a_copy_without_waiting(stage: Stage) -> None:
    x = torch.ones(64, device="meta")
    with stage.ledger(H200) as ledger:
        torch.tensor([1.0]).pin_memory().to("meta", non_blocking=True)
        x.copy_(torch.ones(64).pin_memory(), non_blocking=True)
    assert ledger.done.launches == 2


@pytest.mark.parametrize("done", [torch.abs, torch.neg, lambda x: x * 2, lambda x: torch.mm(x, x), torch.amax])
def test_what_codes_cannot_do(done: Callable[[Tensor], object], stage: Stage) -> None:
    codes = torch.empty(64, 64, dtype=torch.float8_e4m3fn, device="meta")
    with pytest.raises((AssertionError, RuntimeError)), stage.ledger(H200):
        done(codes)


def test_every_launch_counts(stage: Stage) -> None:
    x = torch.ones(64, 64, device="meta")
    with stage.ledger(H200) as ledger:
        x.t().view(64, 64).detach()
        torch.empty(64, device="meta")
        torch.ones(64)  # the host's tensor
        assert not ledger.done.launches
        x.t().contiguous()
        x.add_(1)
        torch.zeros(64, device="meta")
    assert ledger.done.operators == {"aten::clone": 1, "aten::add_": 1, "aten::zeros": 1}


@pytest.mark.parametrize("role", Role)
def test_orientations_that_are_cast_one_by_one(role: Role, stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    """NVFP4's are, in three launches each, if they may not be cast at once."""
    arithmetic, most = precisions.get("nvfp4").arithmetic(B200), of_cast("nvfp4")
    x = torch.empty(256, 256, dtype=torch.bfloat16, device="meta")

    def launches() -> int:
        with stage.ledger(B200) as ledger:
            operand, turned = arithmetic.cast_both(x, role)
            if turned is None:
                arithmetic.turn(operand, x, role)
        return ledger.done.launches

    arithmetic.turn(arithmetic.cast(x, role), x, role)  # its cache exists from now on
    assert most is not None and launches() == most.both
    monkeypatch.setattr(BlockArithmetic, "_can_cast_both_at_once", lambda self, role: False)
    assert launches() == 2 * most.one


@pytest.mark.parametrize("planted", ["a launch more", "kernels that are not compiled"])
def test_more_launches_than_there_need_be(planted: str, stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case("gemm", GEMM, "fp8", H200.key)
    ceiling = of_casts(case)
    assert ceiling == stage.second_step(case, H200).phases["cast"] == 2 * 3
    if planted == "a launch more":
        operand = ScaledArithmetic.operand
        monkeypatch.setattr(
            ScaledArithmetic, "operand", lambda self, tensor, *others: operand(self, tensor.clone(), *others)
        )
    else:
        monkeypatch.setattr(operators.KERNELS, "get", lambda kernel: None)
    assert stage.second_step(case, H200).phases["cast"] > ceiling
