"""Two sides made by hand: what compares, what does not and why."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import replace

import pytest

from fp8bench.analysis.compare.compare import ComparedSides, compare
from fp8bench.analysis.compare.sides import ComparisonSide, make_comparison_side
from fp8bench.analysis.findings import findings
from fp8bench.features.duel.values import CaseResult
from fp8bench.features.duel.verdicts import compare_case_sides
from fp8bench.features.gate.judging import GateOutcome, judge_first_look
from fp8bench.model import (
    Comparison,
    Direction,
    EnergyUse,
    EnergyWindow,
    Environment,
    Level,
    Measurement,
    OperatorCount,
    PhaseCount,
    Record,
    Run,
    Segments,
    SlotSample,
    Status,
    Support,
    Tape,
    Timing,
)
from fp8bench.model.codec import decode
from fp8bench.report.comparisons import comparison_document, comparison_page
from fp8bench.report.terminal import layout
from tests.counts import for_each
from tests.runs import CPU, NATIVE, case, run_of

PARTS = ("cast", "gemm", "unattributed")


def timing(seconds: float, seed: int, rounds: int = 24, parts: tuple[str, ...] = PARTS) -> Timing:
    """Times of a step of `seconds`, a tenth of it casts; noise adds at most 1%."""
    generator = random.Random(seed)
    shares = {"cast": 0.1, "gemm": 0.8, "unattributed": 0.1}

    def call() -> tuple[int, ...]:
        return tuple(int(1e9 * seconds * shares[part] * (1 + generator.expovariate(100))) for part in parts)

    slots = tuple(SlotSample(number, (call(), call()), 1e-3, 1e-3) for number in range(rounds))
    return Timing(Segments(parts, (0,) * len(parts)), slots)


def record(precision: str, milliseconds: float, seed: int, **changes: object) -> Record:
    numbers = (Measurement("peak_memory", "B", (1e6,)), Measurement("product_error", "ratio", (2e-3,)))
    one = Record(
        case("gemm", precision, {"m": 64}),
        NATIVE,
        Status.OK,
        is_reference=precision == "fp32",
        timing=timing(milliseconds / 1e3, seed),
        measurements=numbers,
    )
    return replace(one, **changes)  # type: ignore[arg-type]


def run(
    number: int, bf16: float = 1.0, fp32: float = 2.0, facts: dict[str, object] | None = None, **changes: object
) -> Run:
    """A run whose bf16 case takes the given milliseconds; `changes` are fields of its record."""
    records = [record("fp32", fp32, 2 * number), record("bf16", bf16, 2 * number + 1, **changes)]
    environment = Environment({"machine": "box", "torch": "2.13.0", "load_1min": number, **(facts or {})})  # type: ignore[dict-item]
    return run_of(records, id=f"{number:08x}", started=f"2026-01-05T12:{number:02d}:00", environment=environment)


def side(name: str, *runs: Run) -> ComparisonSide:
    return make_comparison_side(name, [(one, findings(one)) for one in runs])


def held(before: Sequence[Run], after: Sequence[Run]) -> ComparedSides:
    return compare(side("A", *before), side("B", *after))


def of(compared: ComparedSides, metric: str, precision: str = "bf16") -> Comparison:
    found = [
        figure for figure in compared.comparisons if figure.metric == metric and figure.case.endswith(f"/{precision}")
    ]
    assert len(found) == 1
    return found[0]


def test_compares_every_figure_that_both_sides_have() -> None:
    compared = held([run(1)], [run(2)])
    assert [(figure.case.rpartition("/")[2], figure.metric) for figure in compared.comparisons] == [
        ("fp32", "time"),
        ("fp32", "peak_memory"),
        ("fp32", "product_error"),
        ("bf16", "time"),
        ("bf16", "relative_time"),
        ("bf16", "peak_memory"),
        ("bf16", "product_error"),
    ]
    assert of(compared, "time").labels == ("cross-run",) and of(compared, "peak_memory").labels == ()
    assert of(compared, "time").suite == "gemm" and compared.comparable
    assert not compared.only_before and not compared.only_after and not compared.differing_facts


@for_each(("factor", "expected"), [(1.3, "worse"), (0.7, "better"), (1.05, "cannot tell"), (1.0, "cannot tell")])
def test_one_run_on_each_side_shows_only_large_changes(factor: float, expected: str) -> None:
    compared = held([run(1)], [run(2, factor)])
    for metric in ("time", "relative_time"):
        one = of(compared, metric)
        assert one.direction == expected and one.p_value is None
        assert one.ratio.point == pytest.approx(factor, rel=0.01)
        assert (expected == "cannot tell") is bool(one.why)
    assert of(compared, "product_error").direction is Direction.SAME


@for_each(("runs", "faster"), [(1, 0.8), (5, 0.97), (5, 1.0)])
def test_runs_with_some_slow_calls_are_not_faster(runs: int, faster: float) -> None:
    def uneven(number: int) -> Timing:
        one = timing(faster * 1e-3, number)
        slots = [
            replace(slot, calls_ns=(slot.calls_ns[0], tuple(2 * ns for ns in slot.calls_ns[1]))) for slot in one.slots
        ]
        return replace(one, slots=tuple(slots))

    compared = held([run(one) for one in range(runs)], [run(9 + one, timing=uneven(one)) for one in range(runs)])
    for metric in ("time", "relative_time"):
        one = of(compared, metric)
        assert one.direction == "cannot tell" and "uneven" in one.labels
        assert one.why == "the mean over all calls contradicts the fastest calls"
    assert of(compared, "time", "fp32").labels == ("cross-run",)


def test_several_runs_show_how_much_runs_differ() -> None:
    compared = held([run(n) for n in range(4)], [run(n, 1.05) for n in range(5, 9)])
    one = of(compared, "time")
    assert one.direction is Direction.WORSE and one.p_value is not None and one.p_value < 1e-3
    assert of(compared, "time", "fp32").direction is Direction.SAME
    # With only one new and one old run, 5% would be a guess; four old runs settle it.
    before, again = [run(n) for n in range(4)], [run(20, 1.05)]
    assert of(held(before, again), "time").direction is Direction.UNSURE
    beside = side("first look", *(run(n, 1.05) for n in range(5, 9)))
    one = of(compare(side("A", *before), side("again", *again), beside), "time")
    assert one.direction is Direction.WORSE and one.p_value is not None and one.p_value < 0.01
    # All times are 1.5 times as long, so the ratio to the reference is unchanged.
    compared = held([run(n) for n in range(4)], [run(n, 1.5, 3.0) for n in range(5, 9)])
    assert of(compared, "time").direction is Direction.WORSE
    assert of(compared, "relative_time").direction is Direction.SAME


def test_more_rounds_or_other_marks_do_not_change_a_time() -> None:
    # Same noise, 24 rounds against 400: the minimum of 400 is lower, but the ratio must stay 1.
    long = replace(record("bf16", 1.0, 3), timing=timing(1e-3, 3, 400))
    compared = held([run(1)], [replace(run(2), records=(record("fp32", 2.0, 4), long))])
    ratio = of(compared, "time").ratio
    assert ratio.low < 1 < ratio.high
    whole = timing(0.8e-3 / 0.8, 3, parts=("gemm",))
    compared = held([run(1)], [run(2, timing=whole)])
    ratio = of(compared, "time").ratio
    assert ratio.point == pytest.approx(0.8, rel=0.02)


def test_memory_and_errors_are_exact_and_lower_is_better() -> None:
    numbers = (Measurement("peak_memory", "B", (1.01e6,)), Measurement("product_error", "ratio", (1e-3,)))
    compared = held([run(1)], [run(2, measurements=numbers)])
    memory, error = of(compared, "peak_memory"), of(compared, "product_error")
    assert memory.direction is Direction.WORSE and error.direction is Direction.BETTER
    assert memory.ratio.low == memory.ratio.high == pytest.approx(1.01)
    assert (memory.before, memory.after, memory.unit) == (1e6, 1.01e6, "B")
    numbers = (Measurement("sqnr_db", "dB", (30.0,)), Measurement("utilisation_percent", "%", (30.0,)))
    compared = held([run(1, measurements=numbers)], [run(2, measurements=numbers)])
    assert {figure.metric for figure in compared.comparisons if figure.case.endswith("bf16")} == {
        "time",
        "relative_time",
    }


def test_energy_is_never_exact() -> None:
    def joules(number: int, factor: float) -> Run:
        samples = tuple(factor * (1 + 0.001 * place) for place in range(5))
        return run(number, measurements=(Measurement("energy", "J", samples),))

    one = of(held([joules(1, 1.0)], [joules(2, 1.06)]), "energy")
    assert one.direction is Direction.UNSURE and one.p_value is None and one.labels == ("cross-run",)
    assert one.ratio.low < one.ratio.point < one.ratio.high
    assert of(held([joules(1, 1.0)], [joules(2, 1.3)]), "energy").direction is Direction.WORSE
    several = held([joules(n, 1.0 + n / 1e4) for n in range(4)], [joules(n, 1.06 + n / 1e4) for n in range(5, 9)])
    assert of(several, "energy").direction is Direction.WORSE


@for_each(
    ("metric", "before", "after", "direction", "ratio"),
    [
        ("product_error", 0.5, 0.5, "same", 1.0),
        ("product_error", 0.5, 0.6, "worse", 1.2),
        ("product_error", 0.5, 0.50025, "worse", 1.0005),
        ("product_error", 0.5, 0.5000001, "same", 1.0000002),
        ("peak_memory", 1e6, 1e6 + 4, "worse", 1.000004),
        ("peak_memory", 0.0, 0.0, "same", None),
        ("product_error", 0.0, 0.1, "worse", None),
        ("product_error", 0.1, math.inf, "worse", None),
        ("product_error", math.inf, math.inf, "same", None),
        ("product_error", math.nan, 0.1, "better", None),
        ("product_error", 0.1, math.nan, "worse", None),
        ("product_error", math.nan, math.nan, "none", None),
    ],
)
def test_compare_and_duel_judge_exact_values_alike(
    metric: str, before: float, after: float, direction: str, ratio: float | None
) -> None:
    """A difference beyond rounding counts as a change without an interval; a change from zero has no ratio."""
    values = [(Measurement(metric, "B" if metric == "peak_memory" else "ratio", (one,)),) for one in (before, after)]
    first, second = (record("bf16", 1.0, 1, measurements=value) for value in values)
    compared = of(held([run(1, measurements=values[0])], [run(2, measurements=values[1])]), metric)
    fought = next(one for one in compare_case_sides(CaseResult(first, second)) if one.metric == metric)
    for one in (compared, fought):
        assert one.direction == direction and one.p_value is None
        assert (one.ratio.point if one.ratio else None) == (pytest.approx(ratio) if ratio is not None else None)
        assert one.ratio is None or one.ratio.low == one.ratio.high


def test_a_figure_in_another_unit_is_not_compared() -> None:
    values = [(Measurement("queue_delay", unit, (5.0,)),) for unit in ("ms", "s")]
    first, second = (record("bf16", 1.0, 1, measurements=value) for value in values)
    compared = held([run(1, measurements=values[0])], [run(2, measurements=values[1])]).comparisons
    assert "queue_delay" not in {figure.metric for figure in compared}
    fought = next(one for one in compare_case_sides(CaseResult(first, second)) if one.metric == "queue_delay")
    assert fought.direction is Direction.NONE and fought.why == "its unit was ms and is now s"


def test_joules_are_compared_only_if_their_source_is_the_same() -> None:
    def joules(number: int, factor: float, source: str = "rapl") -> Run:
        windows = tuple(EnergyWindow(10, 0.5, 10 * factor * (1 + 0.001 * place), 50) for place in range(3))
        return run(number, energy=EnergyUse(source, windows))

    one = of(held([joules(1, 1.0)], [joules(2, 1.3)]), "energy")
    assert (one.direction, one.unit, one.before) == (Direction.WORSE, "J", pytest.approx(1.001))
    other = held([joules(1, 1.0)], [joules(2, 1.3, "counter")])
    assert "energy" not in {figure.metric for figure in other.comparisons}


def test_failed_cases_and_cases_of_one_side_are_listed() -> None:
    failed = {"status": Status.FAILED, "reason": "out of memory", "timing": None, "measurements": ()}
    one = of(held([run(1)], [run(2, **failed)]), "time")
    assert one.failed and one.direction is Direction.NONE and "out of memory" in one.why
    assert one.before is None and one.ratio is None
    assert not of(held([run(1, **failed)], [run(2)]), "time").failed
    assert not of(held([run(1, **failed)], [run(2, **failed)]), "time").failed
    alone = replace(run(1), records=run(1).records[:1])
    compared = held([alone], [run(2)])
    assert compared.only_after == ("gemm[m=64]@cpu/bf16",) and not compared.only_before


def test_cases_with_different_work_are_not_compared() -> None:
    other = replace(case("gemm", "bf16", {"m": 64}), version="2")
    assert "version 1 before and 2 now" in of(held([run(1)], [run(2, case=other)]), "time").why
    emulated = Support(Level.EMULATED, "no hardware")
    one = of(held([run(1)], [run(2, support=emulated)]), "time")
    assert one.direction is Direction.NONE and "emulated now" in one.why
    compared = held([run(1, support=emulated)], [run(2, 1.4, support=emulated)])  # with itself it compares by its time
    assert of(compared, "time").direction is Direction.WORSE
    assert "relative_time" not in {figure.metric for figure in compared.comparisons}


def test_differing_facts_are_listed() -> None:
    off, on = (
        {"switch oneDNN": value, "switches_set": text} for value, text in ((False, "oneDNN at False"), (True, None))
    )
    for before, names in ((run(1, facts=on), ["switch oneDNN"]), (run(1), [])):
        assert [fact.name for fact in held([before], [run(2, facts=off)]).differing_facts] == names
    after = run(2, facts={"torch": "2.14.0", "asv_cpu": "Xeon", "commit": "ab" * 20})
    compared = held([run(1, facts={"asv_cpu": "EPYC"})], [after])
    assert {fact.name for fact in compared.differing_facts} == {"asv_cpu", "torch"}
    assert (
        tuple(decode(Comparison, one) for one in comparison_document(compared)["comparisons"]) == compared.comparisons
    )
    gpu = replace(CPU, kind="cuda", name="H100", memory_bytes=80 << 30)
    devices = [replace(run(n), devices=(replace(gpu, name=name),)) for n, name in ((1, "H100"), (2, "H200"))]
    assert held([devices[0]], [devices[1]]).conditions == "device cuda:0 was H100, 81920 MiB and is H200, 81920 MiB"


@for_each(
    "facts",
    [
        {"threads": 2},
        {"torch": "2.14.0"},
        {"cpu_governor": "powersave"},
        {"cpu_affinity": 1},
        {"env_OMP_NUM_THREADS": "2"},
        {"switch niceness": 5},
        {"cpu power_cap": 200},
    ],
)
def test_times_under_other_conditions_are_not_a_regression(facts: dict[str, object]) -> None:
    usual = {"threads": 1, "cpu_governor": "performance", "cpu_affinity": 2, "switch niceness": 0, "cpu power_cap": 300}
    sides = [run(number, facts=usual) for number in range(4)], [run(9, 8.0, facts={**usual, **facts})] * 4
    compared = held(*sides)
    for metric in ("time", "relative_time"):
        one = of(compared, metric)
        assert one.direction is Direction.DIFFERS and next(iter(facts)) in one.why
        assert judge_first_look([one])[0].outcome is GateOutcome.IGNORED
        assert one.ratio.point == pytest.approx(8, rel=0.02)
    assert of(compared, "peak_memory").direction is Direction.SAME
    text = " ".join(layout.render(comparison_page(compared), 120).split())
    assert f"{next(iter(facts))} was" in text and "times differ, which is not a regression: B takes 1.0" in text
    assert "x to 8.0" in text and " worse" not in text.partition("verdict:")[0]


@for_each("facts", [{"switch the handler of SIGINT": "SIG_IGN"}, {"load_1min": 5.0}, {"commit": "ab" * 20}])
def test_facts_that_change_no_time_leave_the_verdict(facts: dict[str, object]) -> None:
    usual = {"switch the handler of SIGINT": "SIG_DFL"}
    assert of(held([run(1, facts=usual)], [run(2, 1.3, facts={**usual, **facts})]), "time").direction is Direction.WORSE


def test_quick_runs_count_only_without_complete_runs() -> None:
    quick = replace(run(2, 9.0), request=replace(run(2).request, quick=True))
    ratio = of(held([run(1)], [quick, run(3)]), "time").ratio
    assert ratio.point < 1.1
    ratio = of(held([run(1)], [quick]), "time").ratio
    assert ratio.point > 8


def test_a_few_rounds_have_no_interval() -> None:
    """With three rounds, every resample has the same fastest three."""
    short = timing(2e-3, 5, rounds=3)
    compared = held([run(1, timing=short)], [run(2, timing=short)])
    for one in (of(compared, "time"), of(compared, "relative_time")):
        assert one.direction is Direction.UNSURE and "few rounds" in one.why
        assert one.ratio.level == 0


def test_counts_of_tapes_are_exact_and_name_the_operators_that_changed() -> None:
    def taped(calls: int) -> Tape:
        product = OperatorCount("gemm", "mm", flops=100, bytes=40)
        others = (OperatorCount("gemm", "mul", calls=calls, bytes=1),) if calls else ()
        return Tape((product, *others), (PhaseCount("gemm", 100, 40 + calls, 1 + calls),))

    compared = held([run(1, tape=taped(0))], [run(2, tape=taped(1))])
    launches, flops = of(compared, "launches"), of(compared, "flops")
    assert (launches.direction, launches.before, launches.after) == (Direction.WORSE, 1, 2)
    assert launches.why == "mul in gemm: 0 calls, then 1" and flops.direction is Direction.SAME and not flops.why
    assert of(compared, "moved_bytes").direction is Direction.WORSE

    assert not [figure for figure in held([run(1)], [run(2, tape=taped(1))]).comparisons if figure.metric == "launches"]


def waiting(share: float, milliseconds: float, seed: int) -> Record:
    """A case in which this share of the slots got two thirds of a core."""
    one = record("bf16", milliseconds, seed)
    slots = tuple(
        replace(slot, wall_seconds=1.5 * slot.cpu_seconds) if slot.round < share * 24 else slot
        for slot in one.timing.slots
    )
    return replace(one, timing=replace(one.timing, slots=slots))


@for_each(
    ("old", "new", "loads", "said"),
    [
        (0.0, 0.8, (0.1, 0.1), "other programs took the CPU in 0% of the slots before and 83% of the slots now"),
        (0.7, 0.0, (0.1, 0.1), "other programs took the CPU in 71% of the slots before and 0% of the slots now"),
        (0.5, 0.55, (0.1, 0.1), ""),
        (0.0, 0.0, (0.4, 2.8), "the load at the start was 20% of the cores before and 140% of the cores now"),
        (0.0, 0.0, (0.4, 1.6), ""),
    ],
)
def test_a_busier_machine_on_one_side_is_not_a_regression(
    old: float, new: float, loads: tuple[float, float], said: str
) -> None:
    sides = []
    for number, (share, milliseconds, load) in enumerate(((old, 10.0, loads[0]), (new, 20.0, loads[1]))):
        facts = Environment({"machine": "box", "load_1min": load, "cpu_count": 2})
        records = [record("fp32", 30.0, number), waiting(share, milliseconds, number + 5)]
        sides.append(side(str(number), run_of(records, id=f"{number:08x}", environment=facts)))
    (time,) = [figure for figure in compare(*sides).comparisons if figure.metric == "time" and "bf16" in figure.case]
    assert time.ratio.point == pytest.approx(2, rel=0.05)
    assert time.direction is (Direction.UNSURE if said else Direction.WORSE)
    assert time.why.startswith(said) and (
        not said or time.why.endswith(": measure both sides under the same load, or duel")
    )


@for_each(("times", "said"), [(1.3, Direction.UNSURE), (2.0, Direction.WORSE), (0.8, Direction.UNSURE)])
def test_a_change_that_waiting_for_a_core_explains_is_undecided(times: float, said: Direction) -> None:
    """Both sides got two thirds of a core in nearly all slots, so a change below 1.5 times is undecided."""
    sides = [
        [run_of([record("fp32", 30.0, seed), waiting(share, milliseconds, seed + 5)], id=f"{seed:08x}")]
        for seed, share, milliseconds in ((1, 0.9, 10.0), (2, 1.0, 10.0 * times))
    ]
    time = of(held(*sides), "time")
    assert time.direction is said and time.others == pytest.approx(1.5, rel=1e-3)
    assert ("up to 1.5 times as long because they waited for a core" in time.why) is (said is Direction.UNSURE)
