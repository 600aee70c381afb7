"""Promises that several workloads make in the same words."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
import torch

from fp8bench.errors import UsageError
from fp8bench.model import Level, Scalar
from fp8bench.registry import precisions, workloads
from tests.counts import for_each
from tests.workloads.steps import CPU, H200, small


@for_each(
    ("name", "axis", "value"),
    [
        ("accumulate", "micro_batches", "1"),
        ("accumulate", "micro_batches", "many"),
        ("accumulate", "width", "0"),
        ("accumulate", "gradients", "fp64"),
        ("attention", "sequence", "0"),
        ("attention", "key_heads", "few"),
        ("attention", "scores", "lo"),
        ("attention", "pass", ""),
        ("conv", "batch", "0"),
        ("conv", "channels", "3.5"),
        ("conv", "image", ""),
        ("conv", "pass", "both"),
        ("data", "kind", "writing"),
        ("data", "batch", "0"),
        ("data", "batch", "some"),
        ("data", "record", "-1"),
        ("mlp", "tokens", "0"),
        ("mlp", "width", "x"),
        ("mlp", "gated", "maybe"),
        ("mlp", "pass", "back"),
        ("norm_act", "operation", "gelus"),
        ("norm_act", "tokens", "0"),
        ("norm_act", "width", "-4"),
        ("norm_act", "pass", ""),
        ("optimizer", "fused", "maybe"),
        ("optimizer", "second_moment", "fp8"),
        ("optimizer", "tensors", "0"),
        ("optimizer", "width", "1.5"),
        ("transformer", "batch", "0"),
        ("transformer", "batch", "many"),
        ("transformer", "sequence", "-1"),
        ("transformer", "size", "huge"),
    ],
)
def test_what_an_axis_cannot_be_is_refused(name: str, axis: str, value: str) -> None:
    for facts in (CPU, H200):
        axes = {one.name: one for one in workloads.get(name).axes(facts)}
        with pytest.raises(UsageError, match=re.escape(f"axis '{axis}' cannot be '{value}': expected")):
            axes[axis].values([value])


@for_each(("name", "why"), [("accumulate", "no buffer"), ("optimizer", "no moments"), ("cast", "nothing to cast")])
def test_tf32_is_nothing_to_keep(name: str, why: str) -> None:
    for facts in (CPU, H200):
        support = workloads.get(name).support({}, precisions.get("tf32"), facts)
        assert support.level is Level.REFUSED and why in support.reason
        assert workloads.get(name).support({}, precisions.get("fp8"), facts).level is not Level.REFUSED


@for_each(
    ("name", "changes"),
    [
        ("attention", {"part": "core"}),
        ("attention", {"part": "layer"}),
        ("conv", {}),
        ("mlp", {}),
        ("norm_act", {"operation": "silu_gate"}),
        ("norm_act", {"operation": "layer_norm"}),
        ("norm_act", {"operation": "cross_entropy"}),
    ],
)
def test_two_states_of_one_seed_are_alike(name: str, changes: dict[str, Scalar]) -> None:
    one, other, different = (workloads.get(name).prepare(small(name, "bf16", seed, **changes)) for seed in (3, 3, 4))
    assert one.inputs[0].dtype == torch.bfloat16
    for mine, others in zip(one.list_leaf_tensors(), other.list_leaf_tensors(), strict=True):
        assert torch.equal(mine, others) and mine.data_ptr() != others.data_ptr()
    (output, gradients) = one.outcome()
    (others_output, others_gradients) = other.outcome()
    assert torch.equal(output, others_output) and not torch.equal(output, different.outcome()[0])
    assert not torch.equal(one.inputs[0], different.inputs[0])
    assert all(torch.equal(mine, others) for mine, others in zip(gradients, others_gradients, strict=True))


WIDE: dict[str, Scalar] = {"width": 64, "hidden": 128}


@for_each(("name", "kinds", "changes"), [("mlp", ("up", "down"), WIDE), ("attention", ("qkv", "out"), {})])
def test_a_precision_map_changes_one_product(name: str, kinds: tuple[str, str], changes: dict[str, Scalar]) -> None:
    workload = workloads.get(name)
    setup = small(name, "fp8", **changes)
    bf16 = precisions.get("bf16").arithmetic(CPU)
    mapped = {
        some: workload.error(replace(setup, layers=dict.fromkeys(some, bf16)))["output_error"]
        for some in ((), kinds[:1], kinds[1:], kinds)
    }
    assert len(set(mapped.values())) == 4
    assert max(mapped.values()) == mapped[()] and min(mapped.values()) == mapped[kinds]
    assert mapped[kinds] == workload.error(small(name, "bf16", **changes))["output_error"]
