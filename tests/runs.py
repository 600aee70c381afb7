"""Runs made by hand, for the tests of everything that shows a run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

from hypothesis import strategies as st

from fp8bench.analysis.findings import findings as findings_of
from fp8bench.analysis.labels import POSSIBLY_HARD_LABELS
from fp8bench.model import (
    Case,
    DeviceFacts,
    EnergyUse,
    EnergyWindow,
    Environment,
    Finding,
    Interval,
    Label,
    Level,
    Measurement,
    Overheads,
    Record,
    Request,
    Run,
    Scalar,
    Segments,
    SlotSample,
    Status,
    Support,
    TensorStatistics,
    Timing,
    Verdict,
    Work,
)
from fp8bench.report.terminal.run import render
from fp8bench.store.runs.run_file import infer_plan

Made = tuple[Run, dict[str, Finding]]
Make = Callable[[], Made]
CPU = DeviceFacts("cpu", 0, "AMD EPYC 7B13", 8 << 30, "2.13.0")
NATIVE = Support(Level.NATIVE, "torch's own kernels")
EMULATED = Support(Level.EMULATED, "no hardware for FP8: values rounded, products in fp32")
REFUSED = Support(Level.REFUSED, "no backend")

# The whole terminal output of a run, not only its summary.
render_whole = partial(render, with_details=True)


def case(workload: str, precision: str, params: dict[str, Scalar]) -> Case:
    return Case(workload, tuple(params.items()), precision, "cpu")


def run_of(records: list[Record], **changes: object) -> Run:
    """A run whose plan consists of these records' cases."""
    plan = infer_plan(records)
    run = Run(
        "20260105-120000",
        "2026-01-05T12:00:00Z",
        "fp8bench suite x",
        Request("x"),
        plan,
        Environment({}),
        (CPU,),
        records=tuple(records),
        finished=True,
    )
    return replace(run, **changes)  # type: ignore[arg-type]


def error(metric: str, value: float) -> Measurement:
    return Measurement(metric, "", (value,))


def memory(peak: int) -> Measurement:
    return Measurement("peak_memory", "B", (float(peak),), description="memory at the highest point of a step")


def transformer() -> Made:
    """One group: bf16 as the reference, fp16 slower and in doubt, fp8 emulated; all with their memory."""
    work = Work(flops=3.1e9, tokens=1024)
    params: dict[str, Scalar] = {"layers": 4, "width": 256, "heads": 4, "context": 256, "batch": 4}
    bf16, fp16, fp8 = (case("transformer", name, params) for name in ("bf16", "fp16", "fp8"))
    records = [
        Record(
            bf16,
            NATIVE,
            Status.OK,
            work,
            is_reference=True,
            measurements=(error("loss_error", 1.24e-5), error("gradient_error", 3.1e-3), memory(300 << 20)),
        ),
        Record(
            fp16,
            NATIVE,
            Status.OK,
            work,
            measurements=(error("loss_error", 2.2e-6), error("gradient_error", 4.2e-4), memory(200 << 20)),
        ),
        Record(
            fp8,
            EMULATED,
            Status.OK,
            work,
            measurements=(error("loss_error", 8.8e-4), error("gradient_error", 4.7e-2), memory(345 << 20)),
        ),
    ]
    findings = [
        Finding(
            bf16,
            Verdict.REFERENCE,
            0.0243,
            0.0251,
            0.0213,
            floor=0.006,
            phases=phases(
                0.0243, data_load=1e-6, gemm=0.5, attention=0.1, accumulate=0.05, optimizer_step=0.1, elementwise=0.2
            ),
            below_floor=("data_load",),
        ),
        Finding(
            fp16,
            Verdict.UNSURE,
            0.0249,
            0.0262,
            0.051,
            Interval(1.0247, 0.9971, 1.0533, 0.99),
            0.0094,
            phases=phases(
                0.0249, cast=0.01, gemm=0.5, attention=0.1, accumulate=0.05, optimizer_step=0.1, elementwise=0.2
            ),
            labels=(Label.CONTENDED, Label.FEW_SAMPLES),
            why="80 rounds, noise floor 0.9% (A/A): a difference of 4.7% or more would have been seen",
            typical=Interval(1.04, 0.99, 1.09, 0.99),
        ),
        Finding(
            fp8,
            Verdict.EMULATED,
            0.061,
            0.0625,
            0.04,
            phases=phases(
                0.061, cast=0.6, gemm=0.2, attention=0.04, accumulate=0.02, optimizer_step=0.04, elementwise=0.08
            ),
        ),
    ]
    run = run_of(records, path=".fp8bench/runs/box/20260105T120000Z-0a1b2c3d-7f.jsonl")
    run = replace(run, plan=replace(run.plan, notes=("nvfp4 was left out: --quick keeps three precisions",)))
    return run, {one.case.id: one for one in findings}


def phases(best: float, **shares: float) -> tuple[tuple[str, float], ...]:
    """Seconds of each phase, the rest unattributed."""
    named = [(name, share * best) for name, share in shares.items()]
    return (*named, ("unattributed", best - sum(seconds for _, seconds in named)))


def data(role: str, rows: int, columns: int, amax: float) -> TensorStatistics:
    """Operands within the range of bf16 and fp16; the shares outside E4M3's and E2M1's depend on their columns."""
    outside = (
        ("bf16", 0.0, 0.0),
        ("fp16", 0.0, 0.0),
        ("e4m3", 0.0, columns * 3.9e-7),
        ("e2m1", columns * 2e-9, 0.2 - columns * 1e-5),
    )
    return TensorStatistics("operand", role, rows * columns, amax, outside)


def gemm() -> Made:
    """Three groups: fp32 as the reference, bf16 faster, fp8 emulated; nvfp4 skipped, one fp8 failed.

    Each has separate data: the first loses most to E2M1, the last most to E4M3, with the largest amax.
    """
    records, findings = [], []
    for m, n, k, best in ((256, 256, 256, 412e-6), (512, 512, 512, 3.05e-3), (1, 2048, 2048, 871e-6)):
        work = Work(flops=2.0 * m * n * k)
        params: dict[str, Scalar] = {"m": m, "n": n, "k": k, "product": "forward", "operands": "cast"}
        fp32, bf16, fp8, nvfp4 = (case("gemm", name, params) for name in ("fp32", "bf16", "fp8", "nvfp4"))
        records += [
            Record(
                fp32,
                NATIVE,
                Status.OK,
                work,
                is_reference=True,
                measurements=(error("product_error", 2.3e-7),),
                statistics=(data("input", m, k, 4.0 + 64 / m), data("weight", n, k, 4.25)),
            ),
            Record(bf16, NATIVE, Status.OK, work, measurements=(error("product_error", 2.4e-3),)),
            Record(fp8, EMULATED, Status.FAILED, work, reason="out of memory, even alone")
            if m == 512
            else Record(fp8, EMULATED, Status.OK, work, measurements=(error("product_error", 3.7e-2),)),
            Record(nvfp4, REFUSED, Status.SKIPPED, work, reason="fp4 needs torch 2.8 or later, this is 2.7.1"),
        ]
        findings += [
            Finding(fp32, Verdict.REFERENCE, best, best * 1.02, 0.012, floor=0.004, phases=phases(best, gemm=0.97)),
            Finding(
                bf16,
                Verdict.FASTER,
                best / 2,
                best * 0.52,
                0.02,
                Interval(0.512, 0.508, 0.515, 0.99),
                0.004,
                phases=phases(best / 2, cast=0.1, gemm=0.87),
                typical=Interval(0.51, 0.5, 0.52, 0.99),
            ),
        ]
        if m != 512:
            shares = phases(best * 3, cast=0.7, gemm=0.28)
            findings.append(Finding(fp8, Verdict.EMULATED, best * 3, best * 3.1, 0.03, phases=shares))
    return run_of(records), {one.case.id: one for one in findings}


def judged(*verdicts: tuple[Verdict, float | None, *tuple[Label, ...]]) -> Made:
    """A group of gemm (m=64, m=128, ...) for each verdict on bf16, its ratio to fp32, and its labels."""
    records, findings = [], []
    for number, (verdict, ratio, *labels) in enumerate(verdicts, 1):
        fp32, bf16 = (case("gemm", name, {"m": 64 * number, "k": 64}) for name in ("fp32", "bf16"))
        records += [Record(fp32, NATIVE, Status.OK, is_reference=True), Record(bf16, NATIVE, Status.OK)]
        interval = None if ratio is None else Interval(ratio, ratio * 0.99, ratio * 1.01, 0.99)
        why = "the interval is too wide to tell" if verdict is Verdict.UNSURE else ""
        floor = 0.5 if labels else 0.004  # with the former label no effect is large enough
        findings += [
            Finding(fp32, Verdict.REFERENCE, 1e-3, 1e-3, 0.01, floor=0.004, phases=phases(1e-3, gemm=0.97)),
            Finding(
                bf16,
                verdict,
                1e-3 * (ratio or 1),
                1e-3 * (ratio or 1),
                0.01,
                interval,
                floor,
                phases(1e-3 * (ratio or 1), gemm=0.97),
                labels=tuple(labels),
                why=why,
            ),
        ]
    return run_of(records), {one.case.id: one for one in findings}


words = st.text(st.characters(min_codepoint=33, max_codepoint=126), min_size=1, max_size=60)
numbers = st.one_of(st.none(), st.floats(1e-12, 1e9))
ratios = st.one_of(st.none(), st.builds(Interval, *[st.floats(1e-6, 1e6)] * 3, st.just(0.99)))

shares = st.one_of(st.just(0.0), st.floats(0, 1))
statistics = st.builds(
    TensorStatistics,
    words,
    words,
    st.integers(0, 1 << 40),
    st.floats(0),
    st.lists(st.tuples(words, shares, shares), max_size=6).map(tuple),
)

odd = st.one_of(st.none(), st.floats())
windows = st.builds(EnergyWindow, st.integers(-1, 9), st.floats(), st.floats(), st.integers(0, 99), odd, odd, odd)
energies = st.builds(EnergyUse, words, st.lists(windows, max_size=4).map(tuple), odd, odd, words)


@st.composite
def wild_runs(draw: st.DrawFn) -> Made:
    """Runs with long names and reasons, any labels and any numbers."""
    records, findings = [], {}
    for size in range(draw(st.integers(1, 3))):
        for index in range(draw(st.integers(1, 4))):
            named = case(draw(words), f"p{index}-{draw(words)}", {"size": size, "axis": draw(words)})
            one = replace(named, precision_map=((draw(words), draw(words)),))
            support = draw(st.sampled_from([NATIVE, EMULATED, REFUSED]))
            status = draw(st.sampled_from(list(Status)))
            reason = " ".join(draw(st.lists(words, max_size=20)))
            measured = tuple(error(name, 0.1) for name in draw(st.lists(words, max_size=4)))
            work = Work(draw(st.sampled_from([0.0, 1e9])), draw(st.integers(0, 9)), draw(st.sampled_from([0.0, 1e6])))
            looked_at = tuple(draw(st.lists(statistics, max_size=3)))
            records.append(
                Record(
                    one,
                    support,
                    status,
                    work,
                    index == 0,
                    reason,
                    measurements=measured,
                    statistics=looked_at,
                    energy=draw(st.one_of(st.none(), energies)),
                )
            )
            best, labels = draw(numbers), draw(st.lists(st.sampled_from(list(Label)), unique=True))
            findings[one.id] = Finding(
                one,
                draw(st.sampled_from(list(Verdict))),
                best,
                draw(numbers),
                draw(numbers),
                draw(ratios),
                floor=draw(st.one_of(st.none(), st.floats(0, 10))),
                phases=phases(best, gemm=0.5, cast=0.1) if best else (),
                labels=tuple(labels),
                why=reason,
                label_reasons=tuple((label, draw(words)) for label in labels[::2]),
                hard=tuple(label for label in labels if label in POSSIBLY_HARD_LABELS),
            )
    return run_of(records, path=draw(words), troubles=(draw(words),)), findings


def samples(phases: tuple[str, ...], microseconds: tuple[int, ...], rounds: int = 12, start: int = 0) -> Timing:
    """Two calls per slot; the second call, and rounds after the first, are slightly slower by varying amounts."""
    slots = []
    for number in range(start, start + rounds):
        first = tuple(1000 * cell + 37 * number + 11 for cell in microseconds)
        second = tuple(1000 * cell + 74 * number + 22 for cell in microseconds)
        slots.append(SlotSample(number, (first, second), 1e-3, 1e-3))
    return Timing(Segments(phases, tuple(range(len(phases)))), tuple(slots))


def measured() -> Made:
    """Two groups with raw samples and cases of every kind: native, emulated, apart, skipped, failed."""
    work = Work(flops=4e6, tokens=32, bytes=1e5)
    parts = ("cast", "gemm", "cast", "unattributed")
    plain = ("gemm", "unattributed")
    data = (
        TensorStatistics("linear", "input", 4096, 4.5, (("fp16", 0.0, 0.0), ("e4m3", 0.0, 0.0008), ("e2m1", 0.0, 0.2))),
        TensorStatistics("batch", "", 64, 255.0),
    )
    first: dict[str, Scalar] = {"m": 64, "operands": "cast"}
    second: dict[str, Scalar] = {"m": 128, "padded": True}
    fp32 = samples(plain, (900, 20))
    records = [
        Record(
            case("gemm", "fp32", first),
            NATIVE,
            Status.OK,
            work,
            is_reference=True,
            timing=fp32,
            control=samples(plain, (903, 20)),
            measurements=(error("product_error", 2.3e-7),),
            statistics=data,
        ),
        Record(
            replace(case("gemm", "bf16", first), precision_map=(("head", "fp32"),)),
            NATIVE,
            Status.OK,
            work,
            timing=samples(parts, (30, 400, 40, 1)),
            measurements=(error("product_error", 2.4e-3),),
        ),
        Record(
            case("gemm", "fp16", first),
            NATIVE,
            Status.OK,
            work,
            timing=samples(parts, (1, 2000, 1, 3), start=40),
            paired_with=samples(plain, (910, 21), start=40),
            control=samples(plain, (909, 22), start=40),
        ),
        Record(
            case("gemm", "fp8", first),
            EMULATED,
            Status.OK,
            work,
            timing=samples(parts, (900, 500, 800, 9)),
            measurements=(error("product_error", float("inf")),),
        ),
        Record(case("gemm", "nvfp4", first), REFUSED, Status.SKIPPED, work, reason='no hardware, and\nno "kernel"'),
        Record(case("gemm", "fp32", second), NATIVE, Status.FAILED, work, reason="out of memory, even alone"),
        Record(case("gemm", "bf16", second), NATIVE, Status.OK, Work(), timing=samples(plain, (100, 2), rounds=3)),
    ]
    overheads = (("cpu", Overheads(marker_on=1e-6, marker_off=1e-8, stamp=1e-7)),)
    run = run_of(records, overheads=overheads, path=".fp8bench/runs/box/20260105T120000Z-0a1b2c3d-12345678.jsonl")
    return run, findings_of(run)
