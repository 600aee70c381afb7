"""Kernels that are right wherever everyday tests look, at three seeds; what the judge's own process is for; and honest
kernels that do unusual things."""

from __future__ import annotations

import json
import threading
from pathlib import Path

import pytest
import torch
from torch import Tensor

from fp8bench.errors import WorkerLost
from fp8bench.features.audit import host, times
from fp8bench.features.audit.auditor import SUBJECT_BY_KIND, Shape, run_checks
from fp8bench.features.audit.host import (
    KernelHost,
    is_lazy_tensor_class,
    pack_result_tensors,
    pack_tensor,
    unpack_results,
    unpack_tensor,
)
from fp8bench.features.audit.times import AUDIT_CHECKS
from fp8bench.features.audit.values import AuditOutcome
from fp8bench.user_code.named import make_signature
from suites.audit import codes_of, result_of
from suites.audit_hidden_lies import HIDDEN_LIES, UNUSUAL, LazyTensor, MarkedTensor
from suites.audit_kernels import Kernel, product
from tests.commands import Say
from tests.counts import for_each
from tests.facts import CPU
from tests.features.audit.auditors import make_auditor

BY_NAME = {check.name: check for check in AUDIT_CHECKS}
ROWS = {kernel.name: kernel for kernel in (*HIDDEN_LIES, *UNUSUAL)}
_FP8 = make_signature("product", "fp8")
SEEDS = (0, 1, 2)
ONES = (pack_tensor(torch.ones(4, 16)), pack_tensor(torch.ones(4, 16)))


@pytest.mark.nightly
@for_each("seed", SEEDS)
@for_each("kernel", HIDDEN_LIES, ids=lambda kernel: kernel.name)
def test_a_lie_that_hides_fails(kernel: Kernel, seed: int) -> None:
    assert result_of(kernel, "cpu", AUDIT_CHECKS, seed=seed).outcome is AuditOutcome.FAIL


@pytest.mark.slow
@for_each(
    ("name", "check", "code"),
    [
        ("computed when read", "numbers", "lazy-result"),
        ("memory before its input", "strides", "input-changed"),
        ("an input lost where M is odd", "odd shapes", "input-changed"),
        ("sums on what was in memory", "numbers", "wrong-values"),
        ("backward of the last forward", "backward", "backward"),
        ("a separate linear layer", "backward", "-"),
        ("refuses strides", "strides", "-"),
        ("a result of a subclass", "odd shapes", "-"),
    ],
)
def test_each_hidden_lie_is_found_by_its_check(name: str, check: str, code: str) -> None:
    assert codes_of(result_of(ROWS[name], "cpu", [BY_NAME[check]])).split(", ")[0] == code


@pytest.mark.slow
@for_each(
    ("name", "code"),
    [
        ("results by address and sample", "keyed"),
        ("results by version", "stale"),
        ("one call in 400 differs", "differs"),
        ("another order of sums each time", "-"),
    ],
)
def test_rare_lies_are_found_by_many_calls(name: str, code: str) -> None:
    assert codes_of(result_of(ROWS[name], "cpu", [BY_NAME["memory"]])).split(", ")[0] == code


@pytest.mark.slow
@for_each(
    ("name", "shape", "is_lie"),
    [
        ("half of K where M is a multiple of 256", Shape(256, 40, 64), True),
        ("columns past 512 are zero", Shape(4, 600, 64), True),
        ("a square grid of weight scales is transposed", Shape(8, 640, 640), True),
        ("wrong where K is 768", Shape(24, 80, 768), True),
        ("nothing beyond 4096 of K", Shape(8, 64, 8000), True),
        ("bf16 sums where M is at most 8", Shape(2, 128, 2048), True),
        ("a causal mask that is one off past 576", Shape(700, 1, 16), True),
        ("another way to decode", Shape(4, 64, 2048), False),
    ],
)
def test_sizes_that_are_not_everyday_are_judged_by_a_sample(
    name: str, shape: Shape, is_lie: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(SUBJECT_BY_KIND[ROWS[name].signature.kind], "real_shapes", (shape,))
    monkeypatch.setattr("fp8bench.features.audit.results._RANDOM_SHAPE_COUNT", 0)
    for seed in SEEDS:
        assert (codes_of(result_of(ROWS[name], "cpu", [BY_NAME["sizes"]], seed=seed)) != "-") is is_lie


def test_sizes_stop_when_time_is_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fp8bench.features.audit.results._SIZE_CHECK_SECONDS", -1.0)
    (finding,) = result_of(Kernel("", _FP8, product), "cpu", [BY_NAME["sizes"]]).findings
    assert finding.is_remark and finding.code == "not-tried"


def test_the_results_of_timed_calls_are_judged(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(times, "_LARGEST_SIDE", 1)
    monkeypatch.setattr(times, "_TIMING_SECONDS", 0.0)

    class Timed(KernelHost):
        is_timing = False

        def measure_calls(self, slots: object) -> list[tuple[float, float]]:
            self.is_timing = True
            return super().measure_calls(slots)  # type: ignore[arg-type]

    def idle_when_timed(a: Tensor, b: Tensor) -> Tensor:
        return torch.zeros(len(a), len(b), dtype=torch.bfloat16) if timed.is_timing else product(a, b)

    timed = Timed(idle_when_timed, _FP8, CPU)
    audit = run_checks("", timed, _FP8, CPU, 0, [BY_NAME["speed"]])
    assert codes_of(audit) == "timed-wrong"


def test_a_clock_that_runs_slow_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(times, "_TIMING_SECONDS", 0.0)

    class Wrong(KernelHost):
        def measure_calls(self, slots: object) -> list[tuple[float, float]]:
            return [(seconds / 50, used) for seconds, used in super().measure_calls(slots)]  # type: ignore[arg-type]

    shape = Shape(1024, 1024, 1024)  # long compared with reaching the kernel and returning
    assert times._time_calls(make_auditor(product, host=Wrong), shape, judged_calls=0).clock_fault_text
    assert not times._time_calls(make_auditor(product), shape, judged_calls=0).clock_fault_text


def test_functions_that_harnesses_use_are_not_a_kernels_to_replace(monkeypatch: pytest.MonkeyPatch) -> None:
    assert host.find_replaced_functions() == ()
    monkeypatch.setattr("time.perf_counter", lambda: 0.0)
    monkeypatch.setattr(torch, "allclose", lambda *_: True)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda *_: None)
    assert host.find_replaced_functions() == ("time.perf_counter", "torch.allclose", "torch.cuda.synchronize")


def test_timed_calls_wait_for_every_stream_and_begin_with_a_flushed_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    order = []
    kernel = KernelHost(lambda a, b: order.append("call") or product(a, b), _FP8, CPU)  # type: ignore[func-returns-value]
    monkeypatch.setattr(kernel, "_flush", lambda: order.append("flush"))
    monkeypatch.setattr(kernel, "_synchronize", lambda: order.append("wait"))
    kernel.place_arguments(0, ONES)
    kernel.measure_calls([0])
    assert order == ["flush", "wait", "call", "wait"]


def test_what_a_thread_writes_later_is_not_in_the_copies_of_timed_calls() -> None:
    copied = threading.Event()

    def compute_later(a: Tensor, b: Tensor) -> Tensor:
        result = torch.zeros(4, 4)
        threading.Thread(target=lambda: copied.wait(60) and result.copy_(product(a, b)), daemon=True).start()
        return result

    kernel = KernelHost(compute_later, _FP8, CPU)
    kernel.place_arguments(0, ONES)
    kernel.measure_calls([0])
    copied.set()
    assert not unpack_results(kernel.read_timed_results(0))["product"].any()


def test_arguments_move_or_stay_and_torch_counts_no_version() -> None:
    seen = []
    kernel = KernelHost(lambda a, b: seen.append((a.data_ptr(), a._version)) or product(a, b), _FP8, CPU)  # type: ignore[func-returns-value]
    for moved, fill in ((True, 1.0), (False, 2.0), (True, 2.0)):
        kernel.place_arguments(0, (pack_tensor(torch.full((4, 16), fill)), ONES[1]), moved)
        results, _ = kernel.call_kernel(0)
        assert float(unpack_results(results)["product"][0, 0]) == 16 * fill
    assert seen[0] == seen[1] != seen[2]


@for_each("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e8m0fnu, torch.uint8])
def test_tensors_are_sent_with_their_strides_and_all_of_their_memory(dtype: torch.dtype) -> None:
    wide = torch.arange(24.0).reshape(4, 6).to(dtype)
    part = unpack_tensor(pack_tensor(wide[1:, 2:4].t()))
    assert part.dtype is dtype and part.stride() == (1, 6) and part.storage_offset() == 8
    assert part.untyped_storage().nbytes() == wide.untyped_storage().nbytes()
    assert torch.equal(part.float(), wide[1:, 2:4].t().float())


def test_a_class_of_tensors_is_lazy_if_it_does_something_in_its_own_way() -> None:
    assert is_lazy_tensor_class(LazyTensor)
    assert not any(map(is_lazy_tensor_class, (Tensor, torch.nn.Parameter, MarkedTensor)))


LIARS = """\
import sys
import time

import torch

try:
    from fp8bench.features.audit import promises, values

    promises.ExpectedProduct.judge = lambda *_, **__: values.AuditFinding()
    promises.ExpectedAttention.judge = promises.ExpectedProduct.judge
    torch.equal = torch.allclose = lambda *_, **__: True
except ImportError:
    pass


def patches_the_judge(a, b):
    return torch.zeros(len(a), len(b), dtype=torch.bfloat16)


def looks_for_the_judge(a, b):
    from fp8bench.formats.grids import E4M3
    from fp8bench.formats.operators import values
    from fp8bench.formats.recipes import TENSOR

    if "fp8bench.features.audit.results" in sys.modules:
        return (values(a, E4M3, TENSOR) @ values(b, E4M3, TENSOR).t()).bfloat16()
    return a @ b.t()


def stops_clocks(a, b):
    time.perf_counter = lambda: 0.0
    return a @ b.t()
"""


@pytest.mark.slow
@for_each(
    ("name", "precision", "code"),
    [
        ("patches_the_judge", "fp8", "wrong-values"),
        ("looks_for_the_judge", "fp8", "not-cast"),
        ("stops_clocks", "bf16", "replaced"),
    ],
)
def test_a_kernel_cannot_reach_its_judge(name: str, precision: str, code: str, tmp_path: Path, fp8bench: Say) -> None:
    path = tmp_path / "liars.py"
    path.write_text(LIARS)
    ended, out, _ = fp8bench("audit", f"{path}:{name}", "--kind", "product", "--precision", precision, "--json")
    assert ended == 1 and code in [finding["code"] for finding in json.loads(out)["findings"]]


class _Gone:
    """A worker whose process ended; a fresh one would answer."""

    asked = 0

    def ask(self, *words: object) -> None:
        self.asked += 1
        raise WorkerLost("it was ended by SIGSEGV")


def test_a_kernel_s_process_that_is_gone_is_not_asked_again() -> None:
    gone = _Gone()
    kernel = times.RemoteKernel(gone)  # type: ignore[arg-type]
    for _ in range(3):
        with pytest.raises(WorkerLost):
            kernel.digest_arguments([0])
    assert gone.asked == 1


def test_a_result_of_one_element_may_have_any_stride() -> None:
    one = torch.arange(8, dtype=torch.bfloat16).as_strided((1, 1), (4, 2), 3)
    assert torch.equal(unpack_results(pack_result_tensors({"product": one}))["product"], one)
