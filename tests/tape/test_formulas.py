"""FLOPs of each operator against a count of multiplications in loops, and a GPT's against a sum by hand; kinds of
work."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.flop_counter import flop_registry, register_flop_formula

from fp8bench.formats import operators
from fp8bench.formats.grids import E4M3
from fp8bench.model import Phase
from fp8bench.model.step import ShareKind
from fp8bench.nn import rotations
from fp8bench.tape.formulas import CallLocation, _multiplies_nothing, classify_call, count_flops
from fp8bench.tape.recorder import Call, RecordedTensor
from fp8bench.tape.timed_calls import OperatorTimes
from tests.counts import for_each
from tests.tapes import only, tape_of

M, N, K, G = 3, 5, 4, 2


def loops(*sizes: int) -> int:
    """Counts multiplications and additions of nested loops of these lengths, one of each inside."""
    return sum(2 for _ in product(*map(range, sizes)))


def drawn(*shape: int, dtype: torch.dtype = torch.float32, gradient: bool = False) -> Tensor:
    return torch.randn(shape).to(dtype).requires_grad_(gradient)


def grouped(*shapes: tuple[int, ...], offs: tuple[int, ...]) -> Tensor:
    a, b = (drawn(*shape, dtype=torch.bfloat16) for shape in shapes)
    return F.grouped_mm(a, b, offs=torch.tensor(offs, dtype=torch.int32))


def scaled() -> Tensor:
    a, b = (torch.randn(32, 16).to(torch.float8_e4m3fn) for _ in range(2))
    operand = torch.ones(())
    return torch._scaled_mm(a, b.t(), operand, operand, out_dtype=torch.float32)


PRODUCTS: dict[str, tuple[Callable[[], object], int, str]] = {
    "mm": (lambda: drawn(M, K) @ drawn(K, N), loops(M, N, K), "fp32"),
    "addmm": (lambda: F.linear(drawn(M, K), drawn(N, K), drawn(N)), loops(M, N, K), "fp32"),
    "bmm": (lambda: torch.bmm(drawn(G, M, K), drawn(G, K, N)), loops(G, M, N, K), "fp32"),
    "baddbmm": (lambda: torch.baddbmm(drawn(N), drawn(G, M, K), drawn(G, K, N)), loops(G, M, N, K), "fp32"),
    "addbmm": (lambda: torch.addbmm(drawn(N), drawn(G, M, K), drawn(G, K, N)), loops(G, M, N, K), "fp32"),
    "mv": (lambda: drawn(M, K) @ drawn(K), loops(M, K), "fp32"),
    "addmv": (lambda: torch.addmv(drawn(M), drawn(M, K), drawn(K)), loops(M, K), "fp32"),
    "dot": (lambda: drawn(K) @ drawn(K), loops(K), "fp32"),
    "addr": (lambda: torch.addr(drawn(M, N), drawn(M), drawn(N)), loops(M, N), "fp32"),
    "_euclidean_dist": (lambda: torch.cdist(drawn(30, K), drawn(40, K)), loops(30, 40, K + 2), "fp32"),
    "addmm_": (lambda: drawn(M, N).addmm_(drawn(M, K), drawn(K, N)), loops(M, N, K), "fp32"),
    "_int_mm": (
        lambda: torch._int_mm(torch.ones(32, 16, dtype=torch.int8), torch.ones(16, 24, dtype=torch.int8)),
        loops(32, 24, 16), "int8",
    ),
    "_scaled_mm": (scaled, loops(32, 32, 16), "e4m3"),
    "_grouped_mm of rows": (lambda: grouped((16, 8), (G, 8, 24), offs=(8, 16)), 2 * loops(8, 24, 8), "bf16"),
    "_grouped_mm of columns": (lambda: grouped((G, 8, 16), (16, 24), offs=(8, 24)), loops(8, 24, 16), "bf16"),
    "_grouped_mm of depths": (lambda: grouped((8, 16), (16, 24), offs=(8, 16)), 2 * loops(8, 24, 8), "bf16"),
    "_grouped_mm of pairs": (
        lambda: F.grouped_mm(drawn(G, 8, 16, dtype=torch.bfloat16), drawn(G, 16, 24, dtype=torch.bfloat16)),
        G * loops(8, 24, 16), "bf16",
    ),
    "fp8bench::rotated_and_looked_at": (
        lambda: torch.ops.fp8bench.rotated_and_looked_at(
            drawn(M, 32),
            torch.eye(rotations.ROTATED_RUN_LENGTH).double(),
            *(torch.empty(shape) for shape in ((M, 32), M, M)),
            False,
        ),
        loops(M, 32, rotations.ROTATED_RUN_LENGTH), "fp64",
    ),
}  # fmt: skip


@for_each("name", PRODUCTS)
def test_products_have_the_flops_of_their_loops(name: str) -> None:
    run, flops, path = PRODUCTS[name]
    tape = tape_of(run)
    row = only(tape, name.split(" ")[0])
    assert (row.flops, row.path) == (flops, path) and tape.flops == flops and not tape.unknown


@for_each("groups", [1, 2, 4])
@for_each("transposed", [False, True])
def test_convolutions_have_the_flops_of_their_loops_in_each_direction(groups: int, transposed: bool) -> None:
    """torch 2.13 counts the gradient of the weight once for every group."""
    kind = nn.ConvTranspose2d if transposed else nn.Conv2d
    layer, x = kind(4, 8, 3, padding=1, groups=groups), drawn(2, 4, 6, 6, gradient=True)
    once = loops(2, 6, 6, 8, 4 // groups, 3, 3)  # pictures, their sides, channels out and in, and the window
    tape = tape_of(lambda: layer(x).sum().backward())
    assert [(one.flops, one.backward) for one in tape.operators if one.flops] == [(once, False), (2 * once, True)]
    first = tape_of(lambda: layer(x.detach()).sum().backward())
    assert only(first, "convolution_backward").flops == once  # a picture needs no gradient


def seen(queries: int, keys: int, causal: bool) -> float:
    """Counts the pairs that queries look at; by convention half of a causal square's diagonal."""
    pairs = product(range(queries), range(keys))
    return sum(1 if not causal or j < i else 0.5 if j == i else 0 for i, j in pairs)


@for_each("causal", [False, True])
@for_each(("queries", "keys"), [(6, 6), (3, 7), (7, 3)])
def test_attention_has_two_products_forward_and_five_backward(queries: int, keys: int, causal: bool) -> None:
    q, k, v = (drawn(2, 3, length, 8, gradient=True) for length in (queries, keys, keys))
    tape = tape_of(lambda: F.scaled_dot_product_attention(q, k, v, is_causal=causal).sum().backward())
    once = 2 * 2 * 3 * 8 * seen(queries, keys, causal)
    assert [operator.flops for operator in tape.operators if operator.flops] == [2 * once, 5 * once]
    assert not tape.unknown


def test_attention_that_is_taken_apart_is_the_sum_of_its_products() -> None:
    q = drawn(1, 2, 6, 8)
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        tape = tape_of(lambda: F.scaled_dot_product_attention(q, q, q, is_causal=True))
    assert tape.flops == 2 * loops(2, 6, 6, 8) and not tape.unknown


def test_an_lstm_multiplies_inputs_and_states_at_every_step() -> None:
    layer, x = nn.LSTM(4, 6), drawn(5, 3, 4, gradient=True)
    tape = tape_of(lambda: layer(x)[0].sum().backward())
    once = loops(5, 3, 4 * 6, 4 + 6)
    assert tape.flops == 3 * once and not tape.unknown


def test_what_may_multiply_and_has_no_formula_is_unknown() -> None:
    tape = tape_of(lambda: torch.linalg.inv(drawn(4, 4)))
    assert tape.unknown == 1 and only(tape, "linalg_inv_ex").flops is None and tape.flops == 0
    sparse, dense = RecordedTensor(torch.eye(4).to_sparse()), RecordedTensor(drawn(4, 4))
    assert count_flops(Call(aten.mm.default, "gemm", False, (sparse, dense), {}, dense)) == (None, "")
    x = drawn(8, 8, gradient=True)

    def harmless() -> None:
        y = F.layer_norm(F.gelu(x), (8,)).softmax(-1) * x.cumsum(0).sort().values
        F.cross_entropy(y, torch.zeros(8, dtype=torch.int64)).backward()
        operators.values(x, E4M3)
        torch._foreach_addcmul_([x.detach()], [x.detach()], [y.detach()])
        torch.optim.AdamW([x], fused=True).step()

    tape = tape_of(harmless)
    assert tape.flops == 0 and not tape.unknown


def test_formulas_that_others_tell_torch_are_believed() -> None:
    library = torch.library.Library("tape_tests", "DEF")  # type: ignore[no-untyped-call]
    library.define("twice(Tensor x) -> Tensor")  # type: ignore[no-untyped-call]
    library.impl("twice", lambda x: x @ x, "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]
    twice = torch.ops.tape_tests.twice
    x = drawn(4, 4)
    assert only(tape_of(lambda: twice(x)), "tape_tests::twice").flops is None
    register_flop_formula(twice)(lambda shape, out_shape=None, **_: 2 * shape[0] ** 3)
    try:
        assert only(tape_of(lambda: twice(x)), "tape_tests::twice").flops == loops(4, 4, 4)
    finally:
        del flop_registry[twice]


def test_torch_has_no_formula_for_operators_that_are_known_to_multiply_nothing() -> None:
    """For these its formulas are not imported, which takes 0.3 s where triton is installed."""
    packets = [packet for packet in flop_registry if isinstance(packet, torch._ops.OpOverloadPacket)]
    overloads = [getattr(packet, name) for packet in packets for name in packet.overloads()]
    assert len(overloads) > 20 and not [overload for overload in overloads if _multiplies_nothing(overload)]


aten = torch.ops.aten
FP32, BF16, INT64 = torch.float32, torch.bfloat16, torch.int64


@for_each(
    ("operator", "location", "kind"),
    [
        (aten.mm.default, {}, ShareKind.GEMM),
        (aten.bmm.default, {"module": "layers.0.self_attn"}, ShareKind.ATTENTION),
        (aten.mm.default, {"module": "layers.0.self_attn.q_proj"}, ShareKind.GEMM),
        (aten._softmax.default, {"module": "block.0.SelfAttention"}, ShareKind.ATTENTION),
        (aten._softmax.default, {"module": "loss"}, ShareKind.ELEMENTWISE),
        (aten._scaled_dot_product_flash_attention_for_cpu_backward.default, {}, ShareKind.ATTENTION),
        (aten.convolution.default, {}, ShareKind.GEMM),
        (aten.convolution_backward.default, {}, ShareKind.GEMM),
        (aten._to_copy.default, {"dtypes": (FP32, BF16)}, ShareKind.CAST),
        (aten._to_copy.default, {"dtypes": (INT64, FP32)}, ShareKind.COPY),
        (aten.copy_.default, {"dtypes": (FP32, FP32)}, ShareKind.COPY),
        (aten.copy_.default, {"dtypes": (FP32, BF16)}, ShareKind.CAST),
        (aten.clone.default, {}, ShareKind.COPY),
        (aten.embedding_dense_backward.default, {}, ShareKind.GATHER),
        (aten.index_put_.default, {}, ShareKind.GATHER),
        (aten.t.default, {}, ShareKind.VIEW),
        (aten.empty_like.default, {}, ShareKind.VIEW),
        (aten.native_layer_norm.default, {}, ShareKind.ELEMENTWISE),
        (aten.bernoulli_.float, {}, ShareKind.ELEMENTWISE),
        (aten._foreach_addcdiv_.ScalarList, {}, ShareKind.ELEMENTWISE),
        (aten._foreach_addcdiv_.ScalarList, {"is_optimizing": True}, ShareKind.OPTIMIZER),
        (aten._fused_adamw_.default, {}, ShareKind.OPTIMIZER),
        (aten.add_.Tensor, {"node": "torch::autograd::AccumulateGrad"}, ShareKind.ACCUMULATE),
        (aten.amax.default, {"phase": Phase.CAST}, ShareKind.CAST),
        (aten.mul.Tensor, {"phase": Phase.OPTIMIZER_STEP}, ShareKind.OPTIMIZER),
        (aten.mm.default, {"phase": Phase.ELEMENTWISE}, ShareKind.GEMM),
        (aten._linalg_svd.default, {}, ShareKind.UNKNOWN),
    ],
)
def test_each_operator_has_a_kind(operator: object, location: dict[str, Any], kind: ShareKind) -> None:
    assert classify_call(operator, CallLocation(**location))[0] is kind


def kinds(step: Callable[[], object], *roots: nn.Module) -> set[tuple[ShareKind, str]]:
    mode = OperatorTimes(roots)
    with mode.time_calls() as calls:
        step()
    return {classify_call(call.operator, call.location) for call in calls}


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
    x, q, image = torch.ones(2, 8), torch.ones(1, 2, 8, 4), torch.ones(1, 4, 5, 5)

    def step() -> None:
        with torch.inference_mode():
            F.linear(x, torch.ones(4, 8))
            F.scaled_dot_product_attention(q, q, q)
            F.conv2d(image, torch.ones(4, 4, 1, 1))

    result = kinds(step)
    assert {(ShareKind.GEMM, ""), (ShareKind.ATTENTION, ""), (ShareKind.GEMM, "conv")} <= result
    assert not any(kind is ShareKind.UNKNOWN for kind, _ in result)


def test_what_no_rule_knows_is_unknown_by_its_name() -> None:
    @torch.library.custom_op("fp8bench_tests::strange", mutates_args=())
    def strange(x: Tensor) -> Tensor:
        return x.clone()

    x = torch.ones(2)
    assert kinds(lambda: strange(x)) == {(ShareKind.UNKNOWN, "fp8bench_tests::strange")}
