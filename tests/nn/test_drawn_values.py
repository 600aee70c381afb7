"""Kinds of operand values in every suite that draws them, and constants in every precision."""

from __future__ import annotations

import torch

from fp8bench.model import Request
from fp8bench.numerics.distributions import draw_values
from fp8bench.plan.make import make_plan
from fp8bench.protocols.axes import VALUES
from fp8bench.registry import workloads
from fp8bench.worker.bench import Bench
from tests.counts import for_each
from tests.facts import CPU

KINDS = ("normal", "uniform", "integers", "ones", "zeros")
SMALL = {
    "attention": {"part": "layer", "sequence": "16", "heads": "2", "head_width": "16"},
    "cast": {"shape": "32x64", "direction": "to,from", "role": "input,gradient"},
    "conv": {"batch": "2", "channels": "16", "image": "4"},
    "gemm": {"shape": "16x32x64", "product": "forward,input-gradient,weight-gradient"},
    "mlp": {"tokens": "16", "width": "32", "hidden": "64", "gated": "yes"},
    "norm_act": {"tokens": "16", "width": "32"},
}


def cases(workload: str, kinds: str, *modes: str):  # type: ignore[no-untyped-def]
    axes = tuple((name, tuple(value.split(","))) for name, value in {**SMALL[workload], "values": kinds}.items())
    plan = make_plan(Request(workload, modes, ("cpu",), axes=axes), (CPU,), None)
    return [planned.case for group in plan for planned in group.cases if planned.runs]


@for_each("kind", KINDS)
def test_a_kind_is_what_its_name_says(kind: str) -> None:
    params = {"values": kind}
    one, again = (draw_values(params, (64, 128), torch.Generator().manual_seed(3)) for _ in range(2))
    assert one.dtype is torch.float32 and one.shape == (64, 128) and torch.equal(one, again)
    torch.manual_seed(3)
    assert torch.equal(draw_values(params, (64, 128)), one)
    if kind == "normal":
        assert torch.equal(one, torch.randn(64, 128, generator=torch.Generator().manual_seed(3)))
        assert torch.equal(draw_values({}, (64, 128), torch.Generator().manual_seed(3)), one)
    elif kind == "uniform":
        assert -1 <= float(one.min()) < -0.99 and 0.99 < float(one.max()) <= 1 and len(one.unique()) > 8000
    elif kind == "integers":
        assert one.unique().tolist() == list(range(-4, 5))
    else:
        assert one.unique().tolist() == [float(kind == "ones")]


@for_each("workload", SMALL)
def test_a_suite_is_made_of_what_was_asked(workload: str, bench: Bench) -> None:
    seen: dict[object, tuple[float, ...]] = {}
    for case in cases(workload, ",".join(KINDS), "fp32"):
        state = workloads.get(workload).prepare(bench._make_case_setup(case, CPU))
        weights = state.layer.parameters() if hasattr(state, "layer") else ()
        tensors = [*vars(state).values(), *getattr(state, "inputs", ()), *weights]
        result = [tensor.detach() for tensor in tensors if isinstance(tensor, torch.Tensor) and tensor.dim() > 1]
        kind = VALUES.of(dict(case.params))
        if kind == "zeros":
            assert result and all(not tensor.any() for tensor in result)
        if kind == "ones" and workload != "cast":
            assert result and all(len(tensor.unique()) == 1 for tensor in result)
        seen[kind] = tuple(float(tensor.float().abs().mean()) for tensor in result)
    assert set(seen) == set(KINDS) and len(set(seen.values())) == len(KINDS)
