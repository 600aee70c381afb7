"""Which kind of work operators are, one by one and in steps of small models."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fp8bench.model import Phase
from fp8bench.model.step import ShareKind
from fp8bench.tape.formulas import Where, kind_of
from fp8bench.tape.timed_calls import OperatorTimes
from tests.counts import for_each

aten = torch.ops.aten
FP32, BF16, INT64 = torch.float32, torch.bfloat16, torch.int64


@for_each(
    ("operator", "where", "kind"),
    [
        (aten.mm.default, Where(), (ShareKind.GEMM, "")),
        (aten.bmm.default, Where(), (ShareKind.GEMM, "")),
        (aten.bmm.default, Where(module="layers.0.self_attn"), (ShareKind.ATTENTION, "")),
        (aten.mm.default, Where(module="layers.0.self_attn.q_proj"), (ShareKind.GEMM, "")),
        (aten._softmax.default, Where(module="block.0.SelfAttention"), (ShareKind.ATTENTION, "")),
        (aten._softmax.default, Where(module="loss"), (ShareKind.ELEMENTWISE, "")),
        (aten._scaled_dot_product_flash_attention_for_cpu_backward.default, Where(), (ShareKind.ATTENTION, "")),
        (aten.convolution.default, Where(), (ShareKind.GEMM, "conv")),
        (aten.convolution_backward.default, Where(), (ShareKind.GEMM, "conv")),
        (aten._to_copy.default, Where(dtypes=(FP32, BF16)), (ShareKind.CAST, "")),
        (aten._to_copy.default, Where(dtypes=(INT64, FP32)), (ShareKind.COPY, "")),
        (aten.copy_.default, Where(dtypes=(FP32, FP32)), (ShareKind.COPY, "")),
        (aten.copy_.default, Where(dtypes=(FP32, BF16)), (ShareKind.CAST, "")),
        (aten.clone.default, Where(), (ShareKind.COPY, "")),
        (aten.embedding_dense_backward.default, Where(), (ShareKind.GATHER, "")),
        (aten.index_put_.default, Where(), (ShareKind.GATHER, "")),
        (aten.t.default, Where(), (ShareKind.VIEW, "")),
        (aten.empty_like.default, Where(), (ShareKind.VIEW, "")),
        (aten.native_layer_norm.default, Where(), (ShareKind.ELEMENTWISE, "")),
        (aten.bernoulli_.float, Where(), (ShareKind.ELEMENTWISE, "")),
        (aten._foreach_addcdiv_.ScalarList, Where(), (ShareKind.ELEMENTWISE, "")),
        (aten._foreach_addcdiv_.ScalarList, Where(optimizing=True), (ShareKind.OPTIMIZER, "")),
        (aten._fused_adamw_.default, Where(), (ShareKind.OPTIMIZER, "")),
        (aten.add_.Tensor, Where(node="torch::autograd::AccumulateGrad"), (ShareKind.ACCUMULATE, "")),
        (aten.amax.default, Where(phase=Phase.CAST), (ShareKind.CAST, "")),
        (aten.mul.Tensor, Where(phase=Phase.OPTIMIZER_STEP), (ShareKind.OPTIMIZER, "")),
        (aten.mm.default, Where(phase=Phase.ELEMENTWISE), (ShareKind.GEMM, "")),
        (aten._linalg_svd.default, Where(), (ShareKind.UNKNOWN, "_linalg_svd")),
    ],
)  # fmt: skip
def test_rules(operator: object, where: Where, kind: tuple[ShareKind, str]) -> None:
    assert kind_of(operator, where) == kind


def kinds(step: Callable[[], object], *roots: nn.Module) -> set[tuple[ShareKind, str]]:
    mode = OperatorTimes(roots)
    with mode.watching() as calls:
        step()
    return {kind_of(one.operator, one.where) for one in calls}


def test_under_autocast_casts_are_seen_by_their_dtypes() -> None:
    layer, x = nn.Linear(8, 8), torch.ones(4, 8)

    def step() -> None:
        with torch.autocast("cpu", BF16):
            layer(x).sum().backward()

    assert (ShareKind.CAST, "") in kinds(step, layer)
    into, bools = torch.empty(4, 8), torch.ones(4, 8, dtype=torch.bool)
    assert kinds(lambda: into.copy_(x)) == {(ShareKind.COPY, "")}
    assert (ShareKind.COPY, "") in kinds(bools.float) and (ShareKind.CAST, "") not in kinds(bools.float)


def test_without_gradients_operators_come_whole_and_are_taken_apart() -> None:
    """Under inference mode; a convolution of one number a window is a product, and called one."""
    x, q, image = torch.ones(2, 8), torch.ones(1, 2, 8, 4), torch.ones(1, 4, 5, 5)

    def step() -> None:
        with torch.inference_mode():
            F.linear(x, torch.ones(4, 8))
            F.scaled_dot_product_attention(q, q, q)
            F.conv2d(image, torch.ones(4, 4, 1, 1))

    found = kinds(step)
    assert {(ShareKind.GEMM, ""), (ShareKind.ATTENTION, ""), (ShareKind.GEMM, "conv")} <= found
    assert not any(kind is ShareKind.UNKNOWN for kind, _ in found)


def test_what_no_rule_knows_is_unknown_by_its_name() -> None:
    @torch.library.custom_op("fp8bench_tests::strange", mutates_args=())
    def strange(x: Tensor) -> Tensor:
        return x.clone()

    x = torch.ones(2)
    assert kinds(lambda: strange(x)) == {(ShareKind.UNKNOWN, "fp8bench_tests::strange")}
