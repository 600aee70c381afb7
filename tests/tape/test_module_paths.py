"""Attributing backward operators to modules by autograd node, for every way to interleave a module's nodes with others.

In each case 'region' computes sigmoids and the rest of the model computes tanh: a backward operator of a sigmoid
belongs to the region, that of a tanh does not.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.optimizer import _global_optimizer_pre_hooks
from torch.utils.checkpoint import checkpoint

from fp8bench.model.step import ShareKind
from fp8bench.tape.timed_calls import RANGE_PREFIX, OperatorTimes, TimedCall, compute_step_shares, sum_kernel_seconds
from tests.counts import for_each
from tests.pretended_device import run_pretended


class Region(nn.Module):
    """Two sigmoids around a product, then whatever its case is about: what it gives may be written over."""

    def __init__(self, then: Callable[[Tensor], Any] = lambda y: y) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.eye(4))
        self.then = then

    def forward(self, x: Tensor, *more: Tensor) -> Any:
        y = (x.sigmoid() @ self.weight).sigmoid() + 1.0
        return (self.then(y), *more) if more else self.then(y)


class Model(nn.Module):
    """A region, and what a case does around it, all of it in tanh."""

    def __init__(self, around: Callable[[Region, Tensor], Tensor], region: Region | None = None) -> None:
        super().__init__()
        self.region = region or Region()
        self.around = around

    def forward(self, x: Tensor) -> Tensor:
        return self.around(self.region, x)


@dataclass
class Output:
    """An output class that is not a torch collection."""

    hidden: Tensor


class Box:
    """An object of anybody's, with a tensor in it."""

    def __init__(self, inside: Tensor) -> None:
        self.inside = inside


def interleaved(region: Region, x: Tensor) -> Tensor:
    a = x.tanh()
    y = region(x)
    b = a.tanh() * y
    return b + a.tanh()


def in_place_on_view(region: Region, x: Tensor) -> Tensor:
    y = region(x.tanh())
    y[:2].mul_(2.0)
    return y.tanh()


def in_place_on_input(region: Region, x: Tensor) -> Tensor:
    given = x.tanh() * 1.0
    y = region(given)
    given.add_(1.0)
    return y.tanh() + given


def residual(region: Region, x: Tensor) -> Tensor:
    y, passed = region(x.tanh(), x.tanh())
    return (y + passed).tanh()


CASES: dict[str, tuple[Model, int, int]] = {  # with the sigmoids and tanhs of its backward pass
    "plain": (Model(lambda region, x: region(x.tanh()).tanh()), 2, 2),
    "views of the output": (Model(lambda region, x: region(x.tanh())[1:].t().tanh(), Region(lambda y: y[:3])), 2, 2),
    "an output that nobody uses": (Model(lambda region, x: region(x.tanh(), x)[0].tanh()), 2, 2),
    "called twice": (Model(lambda region, x: region(region(x.tanh()).tanh()).tanh()), 4, 3),
    "checkpoint": (
        Model(lambda region, x: checkpoint(region, x.tanh(), use_reentrant=False).tanh()), 2, 2,
    ),
    "checkpoint in a backward pass of its own": (
        Model(lambda region, x: checkpoint(region, x.tanh(), use_reentrant=True).tanh()), 2, 2,
    ),
    "no input that needs gradients": (Model(lambda region, x: region(x.detach()).tanh()), 1, 1),
    "in place on the output": (Model(lambda region, x: region(x.tanh()).mul_(3.0).tanh()), 2, 2),
    "in place on the input": (Model(in_place_on_input), 2, 2),
    "in place on a view of the output": (Model(in_place_on_view), 2, 2),
    "in place inside, of a number it multiplies": (  # autograd first copies the number, by a separate node
        Model(lambda region, x: region(x.tanh()).tanh(), Region(lambda y: y.div_(y.sum(-1, keepdim=True)))), 2, 2,
    ),
    "a residual passed through": (Model(residual), 2, 3),
    "a dataclass": (Model(lambda region, x: region(x.tanh()).hidden.tanh(), Region(Output)), 2, 2),
    "an object of anybody's": (Model(lambda region, x: region(x.tanh()).inside.tanh(), Region(Box)), 2, 2),
    "a branch beside it": (Model(interleaved), 2, 3),
}  # fmt: skip


def watched(step: Callable[[], object], *roots: nn.Module) -> list[TimedCall]:
    mode = OperatorTimes(roots)
    with mode.time_calls() as calls:
        step()
    return calls


def backward_of(calls: list[TimedCall], name: str) -> list[str]:
    return [
        call.location.module
        for call in calls
        if call.backward and call.operator is getattr(torch.ops.aten, name).default
    ]


@for_each("case", CASES)
def test_a_backward_operator_belongs_to_the_module_that_made_its_node(case: str) -> None:
    model, sigmoids, tanhs = CASES[case]
    x = torch.linspace(-1, 1, 16).view(4, 4).requires_grad_()
    calls = watched(lambda: model(x).sum().backward(), model)
    assert backward_of(calls, "sigmoid_backward") == ["region"] * sigmoids
    assert backward_of(calls, "tanh_backward") == ["Model"] * tanhs
    products = [call for call in calls if call.operator is torch.ops.aten.mm.default]
    assert {one.location.module for one in products} == {"region"}
    assert {call.location.module for call in calls if call.operator is torch.ops.aten.sum.default} == {""}


def test_nothing_is_left_behind() -> None:
    hooks = torch.nn.modules.module
    before = [dict(one) for one in (hooks._global_forward_hooks, hooks._global_forward_pre_hooks)]
    model = Model(lambda region, x: region(x.tanh()).tanh())
    x = torch.linspace(-1, 1, 16).view(4, 4)
    model(x).sum().backward()
    assert model.region.weight.grad is not None
    expected, model.region.weight.grad = model.region.weight.grad, None
    failing = Model(lambda region, x: region(x) @ torch.ones(5))
    mode = OperatorTimes([failing, model])
    with mode.time_calls() as calls:
        with pytest.raises(RuntimeError):
            failing(x)
        x.exp()
    assert calls[-1].location.module == ""
    with mode.time_calls():
        model(x).sum().backward()
    assert torch.equal(model.region.weight.grad, expected)
    assert before == [dict(one) for one in (hooks._global_forward_hooks, hooks._global_forward_pre_hooks)]
    assert not _global_optimizer_pre_hooks


def test_kinds_of_a_whole_step() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 2))
    optimizer = torch.optim.AdamW(model.parameters())
    x = torch.ones(4, 8)

    def step() -> None:
        for _ in range(2):
            model(x).sum().backward()
        optimizer.step()

    calls = watched(step, model)
    shares = compute_step_shares([calls], [1.0])
    kinds = {(part.kind, part.module, part.backward): part.calls for part in shares.parts}
    assert kinds[ShareKind.GEMM, "0", False] == 2 and kinds[ShareKind.GEMM, "2", True] == 4
    assert (ShareKind.OPTIMIZER, "", False) in kinds and (ShareKind.ELEMENTWISE, "1", True) in kinds
    assert {module for kind, module, _ in kinds if kind is ShareKind.ACCUMULATE} == {"0", "1", "2"}
    assert not any(part.kind is ShareKind.UNKNOWN for part in shares.parts)
    assert abs(sum(shares.by_kind.values()) + shares.unattributed_share - 1) < 1e-9

    for parameter in model.parameters():
        one = torch.optim.SGD([parameter], 0.1)
        parameter.register_post_accumulate_grad_hook(lambda _, one=one: one.step())  # type: ignore[misc]
    calls = watched(lambda: model(x).sum().backward(), model)
    assert sum(call.location.is_optimizing for call in calls) >= 6 and all(
        call.backward for call in calls if call.location.is_optimizing
    )


ON_A_DEVICE = """
import torch
from torch import nn
from fp8bench.tape.timed_calls import OperatorTimes

class Region(nn.Module):
    def forward(self, x):
        return x.neg()  # of what it needs in backward the pretended device keeps nothing

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.region = Region()

    def forward(self, x):
        return self.region(x * 2) * 2

ones, threads = torch.ones(4), []
for multithreaded in (False, True):
    model = Model()
    x = Pretended(ones).requires_grad_()
    mode = OperatorTimes([model], lambda: threads.append(threading.get_ident()) or 0)
    if multithreaded:
        with mode._paths.watch(), mode:
            model(x).backward(Pretended(ones))
    else:
        with mode.time_calls():
            model(x).backward(Pretended(ones))
    print(threads[-1] == threading.get_ident(), *(
        f"{one.operator.overloadpacket.__name__}={one.location.module}" for one in mode.calls if one.backward))
"""


@pytest.mark.slow
def test_on_a_device_s_own_thread_nodes_are_known_as_well() -> None:
    here, there = run_pretended(ON_A_DEVICE)
    operators = "mul=Model neg=region mul=Model"
    for said, mine in ((here, "True"), (there, "False")):
        thread, *seen = said.split()
        assert thread == mine and [name for name in seen if name.startswith(("mul", "neg"))] == operators.split()


def event(name: str, start: float, length: float, kind: str = "cpu_op", tid: int = 1, **more: Any) -> dict[str, Any]:
    return {"ph": "X", "name": name, "ts": start, "dur": length, "cat": kind, "tid": tid, "args": more}


def test_kernels_by_the_operator_in_whose_range_they_were_launched() -> None:
    inside, outside = sum_kernel_seconds(
        [
            event(f"{RANGE_PREFIX}0", 0, 20, "user_annotation"),
            event("aten::mm", 5, 10),
            event("cudaLaunchKernel", 6, 2, "cuda_runtime", correlation=1),
            event("hipLaunchKernel", 9, 2, "cuda_runtime", correlation=2),
            event(f"{RANGE_PREFIX}1", 30, 20, "user_annotation"),
            event("cudaLaunchKernel", 35, 2, "cuda_runtime", correlation=3),
            event("cudaLaunchKernel", 60, 2, "cuda_runtime", correlation=4),
            event("one", 100, 5, "kernel", 9, correlation=1),
            event("two", 110, 6, "kernel", 9, correlation=2),
            event("three", 120, 7, "kernel", 9, correlation=3),
            event("four", 130, 8, "kernel", 9, correlation=4),
        ]
    )
    assert {number: round(seconds * 1e6) for number, seconds in inside.items()} == {0: 11, 1: 7}
    assert {name: round(seconds * 1e6) for name, seconds in outside.items()} == {"four": 8}
