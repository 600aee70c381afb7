"""Kinds of work from events of a trace, made by hand: operators within others, compiled kernels, and those of a GPU."""

from __future__ import annotations

from typing import Any

import pytest

from fp8bench.model.step import ShareKind
from fp8bench.tape.profiled import profiled, seconds_by_operator
from fp8bench.tape.timed_calls import RANGE
from tests.counts import for_each


def event(name: str, start: float, length: float, kind: str = "cpu_op", tid: int = 1, **more: Any) -> dict[str, Any]:
    return {"ph": "X", "name": name, "ts": start, "dur": length, "cat": kind, "tid": tid, "args": more}


def found(*events: dict[str, Any]) -> dict[tuple[ShareKind, str, bool], float]:
    return {
        (part.kind, part.what, part.backward): pytest.approx(part.seconds * 1e6) for part in profiled(events).parts
    }  # fmt: skip


def test_what_runs_under_an_operator_is_its_own() -> None:
    assert found(
        event("aten::linear", 0, 100), event("aten::t", 5, 5), event("aten::addmm", 20, 60),
        event("aten::copy_", 25, 10),
        event("aten::convolution", 200, 50), event("aten::mkldnn_convolution", 210, 30),
    ) == {
        (ShareKind.VIEW, "", False): 5, (ShareKind.GEMM, "", False): 60, (ShareKind.GEMM, "conv", False): 50,
    }  # fmt: skip


def test_nodes_optimizers_and_phases_say_what_runs_in_them() -> None:
    node = "autograd::engine::evaluate_function: "
    assert found(
        event(f"{node}MmBackward0", 0, 50), event("MmBackward0", 1, 45), event("aten::mm", 2, 40),
        event(f"{node}torch::autograd::AccumulateGrad", 60, 20), event("aten::add_", 61, 10),
        event("Optimizer.step#AdamW.step", 100, 50, "user_annotation"), event("aten::_foreach_add_", 110, 30),
        event("fp8bench.cast", 200, 50, "user_annotation"), event("aten::amax", 210, 30),
    ) == {
        (ShareKind.GEMM, "", True): 40, (ShareKind.ACCUMULATE, "", True): 10, (ShareKind.OPTIMIZER, "", False): 30,
        (ShareKind.CAST, "", False): 30,
    }  # fmt: skip


@for_each(
    ("kernel", "kind", "what", "fused"),
    [
        ("graph_0_cpp_fused__unsafe_view_mul_silu_3", ShareKind.ELEMENTWISE, "", 0),
        ("cpp_fused__to_copy_0", ShareKind.CAST, "", 0),
        ("triton_poi_fused__to_copy_add_native_layer_norm_2", ShareKind.ELEMENTWISE, "fused with cast", 1),
        ("triton_red_fused_amax_abs_mul_1", ShareKind.ELEMENTWISE, "fused with cast", 1),
        ("triton_tem_fused_addmm_relu_0", ShareKind.GEMM, "fused with elementwise", 0),
        ("triton_poi_fused_embedding_0", ShareKind.GATHER, "", 0),
        ("triton_poi_fused_add_embedding_clone_0", ShareKind.ELEMENTWISE, "fused with copy, gather", 0),
        ("cpp_fused_view_transpose_1", ShareKind.VIEW, "", 0),
        ("graph_2_cpp_fused__scaled_dot_product_flash_attention_for_cpu_clone_2", ShareKind.COPY, "", 0),
        ("triton_poi_fused_mm_t_1", ShareKind.VIEW, "", 0),
        ("cpp_fused_addmm_0", ShareKind.COPY, "", 0),
        ("cpp_fused__to_copy_mm_mul_0", ShareKind.ELEMENTWISE, "fused with cast", 1),
    ],
)
def test_a_compiled_kernel_is_never_split(kernel: str, kind: ShareKind, what: str, fused: int) -> None:
    known = profiled([event(kernel, 0, 10), event(kernel, 20, 10)])
    assert [(part.kind, part.what, part.calls) for part in known.parts] == [(kind, what, 2)] and known.fused == fused


def test_kernels_of_a_gpu_are_those_of_their_operators() -> None:
    launch, kernel = "cuda_runtime", "kernel"
    assert found(
        event("aten::mm", 0, 10), event("cudaLaunchKernel", 2, 3, launch, correlation=1),
        event("ampere_sgemm", 50, 40, kernel, 7, correlation=1),
        event("cudaLaunchKernel", 20, 3, launch, correlation=2),
        event("triton_poi_fused_add_0", 90, 30, kernel, 7, correlation=2),
        event("nvjet_hsh_128", 120, 20, kernel, 7, correlation=99),
        event("somebodys_kernel", 150, 5, kernel, 7, correlation=98),
        event("Memcpy HtoD", 160, 5, "gpu_memcpy", 7, correlation=97),
    ) == {
        (ShareKind.GEMM, "", False): 60, (ShareKind.ELEMENTWISE, "", False): 30,
        (ShareKind.UNKNOWN, "somebodys_kernel", False): 5, (ShareKind.COPY, "", False): 5,
    }  # fmt: skip


def test_kernels_by_the_operator_in_whose_range_they_were_launched() -> None:
    inside, outside = seconds_by_operator([
        event(f"{RANGE}0", 0, 20, "user_annotation"), event("aten::mm", 5, 10),
        event("cudaLaunchKernel", 6, 2, "cuda_runtime", correlation=1),
        event("hipLaunchKernel", 9, 2, "cuda_runtime", correlation=2),
        event(f"{RANGE}1", 30, 20, "user_annotation"), event("cudaLaunchKernel", 35, 2, "cuda_runtime", correlation=3),
        event("cudaLaunchKernel", 60, 2, "cuda_runtime", correlation=4),
        event("one", 100, 5, "kernel", 9, correlation=1), event("two", 110, 6, "kernel", 9, correlation=2),
        event("three", 120, 7, "kernel", 9, correlation=3), event("four", 130, 8, "kernel", 9, correlation=4),
    ])  # fmt: skip
    assert {number: round(seconds * 1e6) for number, seconds in inside.items()} == {0: 11, 1: 7}
    assert {name: round(seconds * 1e6) for name, seconds in outside.items()} == {"four": 8}
