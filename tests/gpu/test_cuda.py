"""Properties that only a GPU can show. Skipped with the reason without one."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from fp8bench.analysis.findings import findings
from fp8bench.devices.cuda import Cuda
from fp8bench.errors import WorkerFault
from fp8bench.formats.codes import encode_with_torch
from fp8bench.formats.recipes import FORMATS_BY_ROLE, TENSOR
from fp8bench.formats.scaled import factor, values
from fp8bench.measure.handle import LocalWorker
from fp8bench.model import CELL_PHASES, Case, DeviceFacts, Level, MemoryUse, Request, Status, Verdict
from fp8bench.model.raw import Settings
from fp8bench.numerics.norms import relative_frobenius
from fp8bench.pipeline import execute
from fp8bench.protocols import Operand, Role, SilentObserver
from fp8bench.registry import precisions
from fp8bench.worker.bench import Bench
from fp8bench.worker.clock import PhaseStampClock
from tests.runs import Made

pytestmark = pytest.mark.gpu


@pytest.fixture
def facts() -> DeviceFacts:
    return Cuda().available()[0]


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, device="cuda", generator=torch.Generator("cuda").manual_seed(seed))


def needs_native(name: str, facts: DeviceFacts) -> None:
    support = precisions.get(name).support(facts)
    if support.level is not Level.NATIVE:
        pytest.skip(f"{name} is not native on {facts.name}: {support.reason}")


def product_case(precision: str, side: int, facts: DeviceFacts) -> Case:
    params = (("m", side), ("n", side), ("k", side), ("product", "forward"), ("operands", "cast"))
    return Case("gemm", params, precision, facts.key)


def executed(store: Path, request: Request) -> Made:
    run = execute(request, store, SilentObserver(), "a test")
    assert run.finished
    return run, findings(run)


def test_the_device_tells_its_facts(facts: DeviceFacts) -> None:
    assert facts.key == "cuda:0" and facts.accelerated and facts.name
    assert facts.capability is not None and facts.capability >= (5, 0)
    assert facts.memory_bytes > 1 << 30
    assert (facts.cuda is None) != (facts.hip is None)


def test_phases_on_the_device_sum_to_the_step(facts: DeviceFacts) -> None:
    stamper = Cuda().stamper(facts.index)
    clock = PhaseStampClock(stamper)
    a = normal(1024, 1024)
    for _ in range(3):
        clock.begin()
        with clock.elementwise:
            with clock.gemm:
                b = a @ a
            with clock.cast:
                b = b.to(torch.bfloat16)
        codes, stamps = clock.end()
        intervals = stamper.intervals_ns(stamps)
        names = [CELL_PHASES[code] for code in codes]
        assert names == ["unattributed", "elementwise", "gemm", "elementwise", "cast", "elementwise", "unattributed"]
        assert all(interval >= 0 for interval in intervals) and intervals[2] > 0
        whole = stamps[0].elapsed_time(stamps[-1]) * 1e6
        assert sum(intervals) == pytest.approx(whole, abs=2_000 * len(intervals), rel=0.01)
        stamper.recycle()


def test_marks_of_a_backward_arrive_in_the_clock(facts: DeviceFacts) -> None:
    """Autograd runs backward in the device's thread."""
    from fp8bench.nn.linear import Linear

    stamper = Cuda().stamper(facts.index)
    clock = PhaseStampClock(stamper)
    layer = Linear(256, 128, precisions.get("fp16").arithmetic(facts)).cuda()
    clock.begin()
    layer(normal(64, 256).requires_grad_(), clock).sum().backward()
    codes, stamps = clock.end()
    assert [CELL_PHASES[code] for code in codes].count("gemm") == 3
    assert len(stamper.intervals_ns(stamps)) == len(codes)


def test_a_slot_on_the_device_has_cells_and_host_time(facts: DeviceFacts) -> None:
    bench = Bench(Settings())
    bench.prepare("key", product_case("fp16", 1024, facts), facts)
    raw = bench.slot("key", 4, 1)
    bench.release("key")
    assert len(raw.steps) == 4
    assert all(min(step.intervals_ns) >= 0 < sum(step.intervals_ns) for step in raw.steps)
    assert raw.host_seconds > 0 and raw.wall_seconds > 0


@pytest.mark.parametrize("role", list(Role))
def test_fp8_codes_are_the_same_on_every_device(role: Role) -> None:
    x = normal(256, 512) * torch.logspace(-6, 3, 256, device="cuda")[:, None]
    fmt = dict(zip(Role, FORMATS_BY_ROLE["hybrid"], strict=True))[role]
    scale, inverse = factor(x, fmt, TENSOR)
    scale_on_cpu, inverse_on_cpu = factor(x.cpu(), fmt, TENSOR)
    codes, on_cpu = encode_with_torch(x, fmt, scale), encode_with_torch(x.cpu(), fmt, scale_on_cpu)
    assert torch.equal(codes.cpu().view(torch.uint8), on_cpu.view(torch.uint8))
    assert torch.equal(inverse.cpu(), inverse_on_cpu)
    assert torch.equal(codes.float() * inverse, values(x, fmt, TENSOR))


@pytest.mark.parametrize(
    "roles", [(Role.INPUT, Role.WEIGHT), (Role.GRADIENT, Role.WEIGHT), (Role.GRADIENT, Role.INPUT)]
)
def test_native_fp8_products_are_close_to_emulated_ones(facts: DeviceFacts, roles: tuple[Role, Role]) -> None:
    needs_native("fp8", facts)
    native = precisions.get("fp8").arithmetic(facts)
    emulated = precisions.get("fp8").arithmetic(DeviceFacts("cpu", 0, "", 0, ""))
    a, b = normal(256, 512), normal(128, 512, seed=1)
    results = []
    for arithmetic in (native, emulated):
        low: list[Operand] = [arithmetic.cast(x, role) for x, role in zip((a, b), roles, strict=True)]
        results.append(arithmetic.product(low[0], low[1], torch.bfloat16))
    assert results[0].shape == results[1].shape == (256, 128)
    assert relative_frobenius(results[0], results[1]) < 5e-3


def test_the_tf32_scope_changes_products_and_is_restored(facts: DeviceFacts) -> None:
    needs_native("tf32", facts)
    a, b = normal(512, 512), normal(512, 512, seed=1)
    exact = a.double() @ b.double()
    with precisions.get("fp32").scope():
        before = a @ b
        with precisions.get("tf32").scope():
            inside = a @ b
        after = a @ b
    assert torch.equal(before, after)
    assert relative_frobenius(before, exact) < 2e-6
    assert 2e-5 < relative_frobenius(inside, exact) < 2e-3


def test_exhausted_memory_is_recognised(facts: DeviceFacts) -> None:
    with pytest.raises(torch.cuda.OutOfMemoryError) as raised:
        torch.empty(1 << 44, dtype=torch.uint8, device="cuda")
    assert Cuda().is_out_of_memory(raised.value)
    worker = LocalWorker(Settings())
    with pytest.raises(WorkerFault) as fault:
        worker.with_time_limit(60.0).prepare("key", product_case("fp32", 1 << 22, facts), facts)
    assert fault.value.out_of_memory
    worker.with_time_limit(60.0).prepare("key", product_case("fp32", 256, facts), facts)
    worker.close()


def test_a_quick_suite_of_products(tmp_path: Path) -> None:
    request = Request(
        "gemm",
        dtypes=("fp32", "fp16", "mxfp8"),
        devices=("cuda",),
        quick=True,
        axes=(("shape", ("512", "1024", "1x1024x1024")),),
    )
    run, result = executed(tmp_path, request)
    assert run.ok and len(run.records) == 9
    for record in run.records:
        finding = result[record.case.id]
        assert record.case.device == "cuda:0" and record.timing is not None
        assert finding.best_seconds is not None and finding.best_seconds > 0
        assert sum(seconds for _, seconds in finding.phases) == pytest.approx(finding.best_seconds)
        assert (finding.verdict is Verdict.EMULATED) == (record.case.precision == "mxfp8")
        assert record.measurement("product_error") is not None
    assert dict(run.overheads)["cuda:0"].event_pair is not None
    assert Path(run.path).is_file()


def test_a_quick_training_step_of_gpt2(facts: DeviceFacts, tmp_path: Path) -> None:
    needs_native("bf16", facts)
    run, result = executed(tmp_path, Request("transformer", dtypes=("bf16", "fp8"), devices=("cuda",), quick=True))
    assert [record.status for record in run.records] == [Status.OK, Status.OK], [item.reason for item in run.records]
    for record in run.records:
        assert record.case.param("size") == "gpt2-124m"
        phases = dict(result[record.case.id].phases)
        wanted = ("data_load", "cast", "gemm", "attention", "accumulate", "optimizer_step", "elementwise")
        assert all(phases[name] > 0 for name in wanted), phases
        loss = record.measurement("loss_error")
        assert loss is not None and loss.samples[0] < 0.05
    assert run.records[0].is_reference and run.records[0].control is not None


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_memory_on_the_device_is_what_a_product_holds(facts: DeviceFacts, precision: str) -> None:
    bench = Bench(Settings())
    case = product_case(precision, 2048, facts)
    peaks = [bench.memory(case, facts) for _ in range(2)]
    bench.prepare("key", case, facts)
    bench.slot("key", 2, 1)
    bench.release("key")
    peaks.append(bench.memory(case, facts))
    operands = 3 * 2048 * 2048 * (4 if precision == "fp32" else 2)
    known = [use.peak for use in peaks if not isinstance(use, str)]
    assert len(known) == 3 and max(known) - min(known) <= 3 << 20
    assert operands <= known[0] <= operands + (128 << 20)


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp8"])
def test_memory_on_the_device_is_told_apart(facts: DeviceFacts, precision: str) -> None:
    needs_native(precision, facts)
    params = (("tokens", 1024), ("width", 1024), ("hidden", 4096), ("gated", "no"), ("pass", "training"))
    use = Bench(Settings()).memory(Case("mlp", params, precision, facts.key), facts)
    assert isinstance(use, MemoryUse) and sum(size for _, size in use.roles) == use.peak
    result = dict(use.roles)
    weights = 4 * 2 * 1024 * 4096  # in blocks that may be larger by a remainder too small to split
    assert weights <= result["weights"] <= weights + (4 << 20) and result["gradients"] > 0
    assert ("low_precision_weights" in result) == (precision != "fp32")
    assert result.get("other", 0) <= 0.01 * use.peak, (result, use.why)
    assert max(item.allocated for item in use.phases) == use.peak
    assert use.reserved is not None and use.reserved >= use.peak


def test_memory_from_before_and_memory_that_has_gone(facts: DeviceFacts) -> None:
    meter = Cuda().memory_meter(facts.index)
    assert not isinstance(meter, str)
    before = normal(1024, 1024)
    held = torch.cuda.memory_allocated(facts.index)
    meter.start()
    kept = normal(512, 512)
    meter.mark()
    normal(2048, 2048)
    course = meter.stop()
    assert course is not None and 0 <= course.peak - kept.nbytes - 4 * 2048 * 2048 <= 2 << 20
    del kept
    assert torch.cuda.memory_allocated(facts.index) <= held and before.numel() == 1 << 20
