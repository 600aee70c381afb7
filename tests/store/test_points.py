"""From runs to points, every number by hand; what is left out, and why; points of several runs of one commit."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fp8bench.model import (
    Case,
    DeviceFacts,
    EnergyUse,
    EnergyWindow,
    Environment,
    Params,
    PhaseCount,
    Point,
    Record,
    Request,
    Run,
    Scalar,
    Segments,
    Series,
    SlotSample,
    StaticScales,
    Status,
    Tape,
    Timing,
    Work,
)
from fp8bench.model.ranks import Transfer
from fp8bench.model.specs import COUNTS
from fp8bench.model.stopping import EMULATED_ROUNDS, LEAST_ROUNDS
from fp8bench.protocols import Grid, Phases, Setup, Workload
from fp8bench.protocols.axes import Axis, whole_number
from fp8bench.registry import workloads
from fp8bench.store import points
from fp8bench.store.points import extract_history_points, merge_points, metric_of_point
from fp8bench.store.series import METHOD_VERSION, list_grid_cells, list_tracked_metrics
from tests.counts import for_each
from tests.facts import CPU, H200
from tests.fakes import MS
from tests.runs import EMULATED, NATIVE, REFUSED, error, run_of

PARAMS: Params = (("m", 512), ("n", 512), ("k", 512), ("product", "forward"), ("operands", "cast"))
WORK = Work(flops=5e11)
TEXT = "python-3.11.7:1a2b3c4d"


def rounds(phases: tuple[str, ...], *slots: list[tuple[int, ...]]) -> Timing:
    """A slot for each list of calls, whose cells are in ms."""
    made = tuple(
        SlotSample(number, tuple(tuple(cell * MS for cell in call) for call in calls), 1.0, 1.0)
        for number, calls in enumerate(slots)
    )
    return Timing(Segments(phases, tuple(range(len(phases)))), made)


def case(precision: str, params: Params = PARAMS, workload: str = "gemm", **words: Any) -> Case:
    return Case(workload, params, precision, words.pop("device", "cpu"), **words)


FP32 = Record(
    case("fp32"), NATIVE, Status.OK, WORK, is_reference=True,
    timing=rounds(("gemm", "unattributed"), [(3, 2), (4, 1)], [(8, 0), (9, 1)]),
    control=rounds(("gemm", "unattributed"), [(16, 0), (17, 0)], [(2, 0), (3, 0)]),
    measurements=(error("product_error", 1.23456789e-7), error("kernel_error", 1e-7), error("peak_memory", 4096.0)),
)  # fmt: skip
# Counts are stored with all digits.
TAPE = Tape(phases=(PhaseCount("cast", 0, 100, 4), PhaseCount("gemm", 4_000_000_001, 200, 3)))
BF16 = Record(
    case("bf16"), NATIVE, Status.OK, WORK,
    timing=rounds(("cast", "gemm", "cast", "unattributed"), [(1, 2, 1, 0), (2, 1, 1, 1)], [(0, 1, 0, 0), (1, 5, 0, 1)]),
    measurements=(error("product_error", 0.002), error("kernel_error", 0.0016), error("peak_memory", 2048.0)),
    tape=TAPE,
)  # fmt: skip
FP8 = Record(
    case("fp8"),
    EMULATED,
    Status.OK,
    WORK,
    timing=rounds(("cast", "gemm"), [(7, 3), (8, 2)]),
    measurements=(error("product_error", 0.03), error("kernel_error", 0.0017)),
)
RECORDS = [FP32, BF16, FP8]


def run(records: list[Record] = RECORDS, **request: Any) -> Run:
    """A run of these records on one CPU, as asv would measure it except for the request."""
    return run_of(records, devices=(CPU,), request=Request("gemm", **request))


def samples(content: Run, precision: str) -> dict[str, tuple[float, ...]]:
    """Samples by metric, for one precision of gemm's first cell."""
    return {
        point.series.removeprefix("gemm.Gemm.track_"): point.samples
        for point in extract_history_points(content).points
        if point.cell == (precision, "512")
    }


TOLD: dict[str, dict[str, tuple[float, ...]]] = {
    # Rounds of 3 and 1 ms against 4 and 8, and 16 and 2 of the control: the geometric mean is 8 and 4.
    "bf16": {
        "time": (3e-3, 1e-3), "time_cast": (2e-3, 0.0), "time_gemm": (1e-3, 1e-3), "seconds_per_tflop": (6e-3, 2e-3),
        "relative_time": (0.375, 0.25), "mean_time": (4.25e-3,),
        "relative_mean_time": (float(f"{4.25 / math.sqrt(7 * 9.5):.6g}"),), "peak_memory": (2048.0,),
        "product_error": (0.002,), "kernel_error": (0.0016,), "flops": (4_000_000_001.0,), "moved_bytes": (300.0,),
        "launches": (7.0,),
    },
    # fp32 has no relative time and no cast. Ratios are rounded, because asv shows all digits.
    "fp32": {
        "time": (4e-3, 8e-3), "time_gemm": (3e-3, 8e-3), "seconds_per_tflop": (8e-3, 16e-3), "mean_time": (7e-3,),
        "product_error": (1.23457e-7,), "kernel_error": (1e-7,), "peak_memory": (4096.0,),
    },
    # Emulated: a time and errors, but no speed.
    "fp8": {
        "time": (9e-3,), "time_cast": (7e-3,), "time_gemm": (2e-3,), "mean_time": (10e-3,),
        "product_error": (0.03,), "kernel_error": (0.0017,),
    },
}  # fmt: skip


@for_each("precision", TOLD)
def test_every_metric_that_is_declared_has_a_point_and_every_number_is_right(precision: str) -> None:
    grid = workloads.get("gemm").history
    assert grid is not None
    content = samples(run(), precision)
    assert list(content) == [metric.name for metric in list_tracked_metrics(grid)]
    told = {name: values for name, values in content.items() if values}
    assert told == {name: pytest.approx(values, rel=1e-12) for name, values in TOLD[precision].items()}


def test_points_come_under_their_series_with_the_version_of_their_case() -> None:
    content = extract_history_points(run())
    assert (content.untracked_cases, content.why) == (0, "")
    assert {point.series for point in content.points} == {series.name for series in content.series}
    assert len(content.points) == len(content.series) * 3
    assert {point.cell for point in content.points} == {("fp32", "512"), ("bf16", "512"), ("fp8", "512")}
    assert (
        {point.version for point in content.points}
        == {point.version for point in content.series}
        == {f"{METHOD_VERSION}.1"}
    )
    old = [replace(record, case=replace(record.case, version="0")) for record in RECORDS]
    assert {point.version for point in extract_history_points(run(old)).points} == {f"{METHOD_VERSION}.0"}


@for_each("status", [Status.SKIPPED, Status.FAILED])
def test_a_case_without_numbers_is_a_point_with_its_reason(status: Status) -> None:
    content = extract_history_points(run([FP32, replace(BF16, status=status, reason="why")]))
    lost = [point for point in content.points if point.cell[0] == "bf16"]
    assert len(lost) == len(content.series)
    assert all((point.status, point.reason, point.samples) == (status, "why", ()) for point in lost)


@for_each(
    "lead",
    [
        [replace(FP32, is_reference=False), replace(FP8, is_reference=True, support=NATIVE)],
        [replace(FP32, timing=None, control=None, status=Status.FAILED)],
        [replace(FP32, support=REFUSED, timing=None, control=None, status=Status.SKIPPED)],
        [replace(FP32, case=case("fp32", (("m", 256), *PARAMS[1:])))],
        [],
    ],
)
def test_relative_time_is_over_the_highest_precision_of_the_grid_only(lead: list[Record]) -> None:
    """Relative to a lower precision it would be a different figure under the same name."""
    content = samples(run([*lead, BF16]), "bf16")
    assert content["relative_time"] == () and content["time"]


@for_each(
    ("words", "why"),
    [
        ({"threads": 2}, "it was measured with --threads 2, but the history tracks one thread"),
        ({"seed": 7}, "it was measured with --seed 7, but the history tracks seed 0"),
        ({"isolation": False}, "it was measured without a worker (--no-isolation)"),
    ],
)
def test_a_run_under_other_conditions_is_in_no_series(words: dict[str, Any], why: str) -> None:
    assert extract_history_points(run(**words)) == points.RunHistoryPoints(untracked_cases=3, why=why)


OUTSIDE = {
    "shape": case("bf16", (("m", 256), *PARAMS[1:])),
    "dtype": case("tf32"),
    "map": case("bf16", precision_map=(("head", "fp32"),)),
    "scales from data": case("bf16", static=StaticScales(8)),
    "second device": case("bf16", device="cuda:0"),
    "of a gpu": case("bf16", (("m", 4096), ("n", 4096), ("k", 4096), *PARAMS[3:])),
    "fewer parameters": case("bf16", PARAMS[:3]),
}


@for_each("name", OUTSIDE)
def test_cases_outside_of_the_grid_are_counted_and_left_out(name: str) -> None:
    content = extract_history_points(run([FP32, replace(BF16, case=OUTSIDE[name])]))
    assert (content.untracked_cases, content.why) == (1, "") and {point.cell for point in content.points} == {
        ("fp32", "512")
    }
    alone = extract_history_points(run([replace(BF16, case=OUTSIDE[name])]))
    assert alone == points.RunHistoryPoints(untracked_cases=1)


def test_the_machines_main_device_is_its_first_gpu() -> None:
    shape = (("m", 4096), ("n", 4096), ("k", 4096), *PARAMS[3:])
    both = replace(run([FP32, replace(BF16, case=case("bf16", shape, device="cuda:0"))]), devices=(CPU, H200))
    content = extract_history_points(both)
    assert content.untracked_cases == 1 and {point.cell for point in content.points} == {("bf16", "4096")}
    second = replace(H200, index=1)
    other = run([replace(BF16, case=case("bf16", shape, device="cuda:1"))])
    assert extract_history_points(replace(other, devices=(CPU, H200, second))) == points.RunHistoryPoints(
        untracked_cases=1
    )
    assert extract_history_points(replace(run(), devices=())) == points.RunHistoryPoints(untracked_cases=3)


def transformer(data: str) -> Record:
    params: dict[str, Scalar] = {
        "size": "nano",
        "batch": 2,
        "sequence": 96,
        "micro_batches": 2,
        "checkpointing": "no",
        "compile": "no",
        "attention": "auto",
        "weights": "cached",
        "data": data,
    }
    made = case("bf16", tuple(params.items()), "transformer", version=workloads.get("transformer").version)
    return replace(BF16, case=made, work=Work(tokens=1000))


def test_the_text_is_part_of_the_version_and_a_users_own_is_in_no_series() -> None:
    content = extract_history_points(run([transformer(TEXT)]))
    wanted = f"{METHOD_VERSION}.{workloads.get('transformer').version} {TEXT}"
    assert {point.version for point in content.points} == {point.version for point in content.series} == {wanted}
    times = {point.series.rpartition("_")[2]: point.samples for point in content.points}
    assert times["mtok"] == pytest.approx((3.0, 1.0))
    content = extract_history_points(run([transformer("mine:1a2b3c4d"), BF16], data="mine.txt"))
    assert content.untracked_cases == 1 and {point.cell for point in content.points} == {("bf16", "512")}


def test_suites_without_a_grid_are_counted_with_a_reason() -> None:
    unknown = replace(BF16, case=case("bf16", workload="nosuch"))
    hidden = replace(BF16, case=case("bf16", workload="_planted"))
    assert extract_history_points(run([unknown])) == points.RunHistoryPoints(
        untracked_cases=1, why="the suite nosuch is unknown; --import its module"
    )
    assert extract_history_points(run([hidden])) == points.RunHistoryPoints(
        untracked_cases=1, why="the suite _planted declares no grid"
    )
    kernel = replace(BF16, case=case("bf16", workload="bench"))
    assert "write a suite of your function (docs/user-suites.md)" in extract_history_points(run([kernel])).why
    content = extract_history_points(run([unknown, BF16, hidden]))
    assert content.untracked_cases == 2 and content.why and len(content.points) == len(content.series)


class Own(Workload):
    """A user's workload with an axis called 'data' that is not a text."""

    name = "own"
    summary = "nothing much"
    history = Grid(cpu={"data": ("1", "2")}, gpu={"data": ("3",)}, dtypes=("bf16",), per="tokens")

    def axes(self, facts: DeviceFacts) -> tuple[Axis, ...]:
        return (Axis("data", "how many", ("1",), whole_number()),)

    def work(self, params: Mapping[str, Scalar]) -> Work:
        return Work(1.0)

    def prepare(self, setup: Setup) -> Any:
        raise NotImplementedError

    def step(self, state: Any, phase: Phases) -> None:
        raise NotImplementedError


def own(monkeypatch: pytest.MonkeyPatch, kind: type[Workload]) -> Run:
    monkeypatch.setattr(workloads, "_leaves", {**workloads._leaves, "own": kind})
    return run([replace(BF16, case=case("bf16", (("data", number),), "own")) for number in (1, 2)])


def test_an_axis_that_is_called_data_is_no_text(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its values are cells of one series instead of versions of which only the newest counts."""
    workloads.names()
    content = extract_history_points(own(monkeypatch, Own))
    assert content.untracked_cases == 0
    assert {(point.version, point.cell) for point in content.points} == {
        (f"{METHOD_VERSION}.1", ("bf16", 1)),
        (f"{METHOD_VERSION}.1", ("bf16", 2)),
    }
    # Time per token only if there are tokens.
    assert {point.samples for point in content.points if point.series.endswith("per_mtok")} == {()}


def test_a_grid_that_cannot_be_followed_costs_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    workloads.names()
    faulty = type("Faulty", (Own,), {"history": replace(Own.history, dtypes=())})
    mixed = own(monkeypatch, faulty)
    content = extract_history_points(replace(mixed, records=(*mixed.records, BF16)))
    assert content.untracked_cases == 2 and {point.cell for point in content.points} == {("bf16", "512")}
    assert content.why.startswith("the grid that suite 'own' declares cannot be tracked: its dtypes are none")


@for_each(
    ("words", "hasty"),
    [
        ({}, False),
        ({"quick": True}, True),
        ({"rounds": LEAST_ROUNDS - 1}, True),
        ({"rounds": LEAST_ROUNDS}, False),
        ({"grid": True}, False),
    ],
)
def test_few_rounds_are_hasty(words: dict[str, Any], hasty: bool) -> None:
    by_metric = {
        point.series.rpartition("track_")[2]: point.hasty for point in extract_history_points(run(**words)).points
    }
    assert by_metric.pop("product_error") is by_metric.pop("kernel_error") is by_metric.pop("peak_memory") is False
    assert not any(by_metric.pop(name) for name in COUNTS)
    assert set(by_metric.values()) == {hasty}


def test_a_budget_that_ended_early_is_hasty() -> None:
    """A plain command takes only two rounds of a slow case; two rounds within a budget may be an accident."""
    long = replace(BF16, timing=rounds(("gemm",), *[[(3,)]] * LEAST_ROUNDS))
    emulated = replace(FP8, timing=rounds(("cast", "gemm"), *[[(7, 3)]] * EMULATED_ROUNDS))  # it never gets more
    for record, budget, hasty in (
        (BF16, None, False),
        (BF16, 1.0, True),
        (long, 1.0, False),
        (emulated, 1.0, False),
        (FP8, 1.0, True),
    ):
        points = extract_history_points(run([record], budget=budget)).points
        assert [point.hasty for point in points if metric_of_point(point) == "time"] == [hasty]


def under(changed: Run) -> Any:
    """The conditions of its first point; all points of a run have the same, except counts."""
    (content,) = {
        point.under for point in extract_history_points(changed).points if metric_of_point(point) not in COUNTS
    }
    return content


@for_each(
    ("facts", "counts"),
    [
        ({"torch": "2.12.0"}, True),
        ({"fp8bench": "9"}, True),
        ({"env_ONEDNN_MAX_CPU_ISA": "AVX2"}, True),
        ({"cpu_governor": "powersave"}, True),
        ({"cpu_affinity": 1}, True),
        ({"load_1min": 3.0}, False),
        ({"imports_sha256": "0123"}, False),
        ({"cpu driver": "580.65"}, True),
        ({"cuda:7 driver": "580.65"}, False),
        ({"rank 0 NCCL_ALGO": "Ring"}, True),
        ({"env_FP8BENCH_QUANTISERS": "eager"}, False),
    ],
)
def test_software_and_settings_are_conditions(facts: dict[str, Any], counts: bool) -> None:
    """Load varies, a kernel does not make a new machine, and imports next to a suite of fp8bench do not count."""
    before = Environment({"torch": "2.13.0", "cpu_governor": "performance"})
    point, other = run(), replace(run(), environment=Environment({**before.facts, **facts}))
    assert (under(replace(point, environment=before)) != under(other)) is counts


def test_the_device_and_the_code_of_a_users_suite_are_conditions(monkeypatch: pytest.MonkeyPatch) -> None:
    # CUDA_VISIBLE_DEVICES may make another model the first GPU of one machine.
    assert under(run()) != under(replace(run(), devices=(replace(CPU, name="another"),)))
    assert under(run()) == under(replace(run(), devices=(replace(CPU, memory_bytes=1),)))
    # git may not track a suite's file, so that the commit does not identify its contents.
    workloads.names()
    mine = own(monkeypatch, Own)
    assert under(mine) != under(replace(mine, environment=Environment({"imports_sha256": "0123"})))


@for_each(
    ("facts", "same"),
    [
        ({"cpu_governor": "powersave"}, True),
        ({"cpu driver": "580.65"}, True),
        ({"python": "3.12"}, True),
        ({"torch": "2.12.0"}, False),
        ({"fp8bench": "9"}, False),
    ],
)
def test_counts_depend_on_software_alone(facts: dict[str, Any], same: bool) -> None:
    """A changed clock governor would split their history for nothing.

    Quantisers count as one operator, compiled or not.
    """
    assert BF16.timing is not None
    eager = [FP32, replace(BF16, timing=replace(BF16.timing, eager="--quick"))]
    before, after = (
        {point.under for point in extract_history_points(made).points if metric_of_point(point) in COUNTS}
        for made in (run(), replace(run(eager), environment=Environment(facts)))
    )
    assert len(before) == len(after) == 1 and (before == after) is same


def test_compiled_and_eager_quantisers_are_conditions_of_what_they_change() -> None:
    """For times and memory of cases with quantisers; errors are equal bit for bit, and so are tapes."""
    assert FP8.timing is not None
    by_kind = {
        name: run([FP32, replace(FP8, timing=replace(FP8.timing, eager=why, fused=fused))])
        for name, why, fused in (("none", "", False), ("compiled", "", True), ("eager", "--quick", True))
    }
    plain = under(run([FP32]))
    for name, made in by_kind.items():
        for point in extract_history_points(made).points:
            metric = point.series.removeprefix("gemm.Gemm.track_")
            touched = name != "none" and point.cell[0] == "fp8"
            touched = touched and not metric.endswith("_error")
            if metric not in COUNTS:
                assert point.under == (*plain, *((("quantisers", name),) if touched else ())), metric


def test_the_source_of_joules_is_a_condition_of_theirs() -> None:
    runs = [
        run([replace(BF16, energy=EnergyUse(source, (EnergyWindow(1, 1.0, joules, 11),)))])
        for source, joules in (("counter", 1.0), ("instant", 1.7), ("counter", 1.1))
    ]
    points = [point for made in runs for point in extract_history_points(made).points]
    plain = under(run())
    for point in points:
        energy = point.series.endswith("track_energy")
        if metric_of_point(point) in COUNTS:
            continue
        assert (point.under == plain) is not energy
        assert not energy or point.under[-1][0] == "energy_source"
    (point,) = [point for (name, _), point in merge_points(points).items() if name.endswith("track_energy")]
    assert point.samples == (1.0, 1.1)
    windows = (EnergyWindow(100, 1.0, 190.0, 12, 0.004), EnergyWindow(50, 0.5, 96.0, 11, 0.004))  # one sample each
    told = run([replace(record, energy=EnergyUse("counter", windows)) for record in (BF16, FP8)])
    assert samples(told, "bf16")["energy"] == samples(told, "fp8")["energy"] == pytest.approx((1.9, 1.92))
    assert samples(run([replace(BF16, energy=EnergyUse("none", why="a virtual machine"))]), "bf16")["energy"] == ()


def point(*values: float, **words: Any) -> Point:
    return Point(
        words.pop("series", "x.X.track_time"),
        words.pop("cell", ("bf16",)),
        words.pop("version", "1.1"),
        values,
        **words,
    )


FAILED = point(status=Status.FAILED, reason="out of memory")
SKIPPED = point(status=Status.SKIPPED, reason="no kernel")
TEN, TWELVE = (point(count, series="x.X.track_launches") for count in (10.0, 12.0))
OLD, NEW = (("torch", "2.12.0"),), (("torch", "2.13.0"),)
MERGED: dict[str, tuple[list[Point], Point]] = {
    "samples in their order": ([point(3.0, 1.0), point(2.0), point(3.0)], point(3.0, 1.0, 2.0, 3.0)),
    "a whole run among hasty ones": ([point(9.0, hasty=True), point(1.0), point(8.0, hasty=True)], point(1.0)),
    "a failure after samples": ([point(1.0), FAILED], point(1.0)),
    "a failure before samples": ([FAILED, point(1.0)], point(1.0)),
    "skipped at last": ([FAILED, SKIPPED], SKIPPED),
    "an upgrade": ([point(1.0, under=OLD), point(2.0, under=NEW), point(3.0, under=NEW)], point(2.0, 3.0, under=NEW)),
    "counts, between which nobody counted 11": ([TEN, TWELVE], TWELVE),
    "a quick run of new": ([point(1.0, under=OLD), point(2.0, under=NEW, hasty=True)], point(1.0, under=OLD)),
}  # fmt: skip


@for_each(("given_points", "expected"), MERGED.values())
def test_points_of_one_cell_are_merged(given_points: list[Point], expected: Point) -> None:
    ((_, content),) = merge_points(given_points).items()
    assert content == expected


some_points = st.builds(
    Point,
    st.sampled_from(["x.X.track_time", "y.Y.track_time"]), st.sampled_from([("bf16",), ("fp8",)]),
    st.sampled_from(["1.1", "1.2"]), st.lists(st.floats(0, 1), max_size=3).map(tuple),
    st.sampled_from(list(Status)), st.just("why"), st.booleans(),
)  # fmt: skip


@given(st.lists(some_points, max_size=12))
def test_merging_loses_no_whole_sample(given_points: list[Point]) -> None:
    content = merge_points(given_points)
    newest = {point.series: point.version for point in given_points}
    assert content.keys() == {
        (point.series, point.cell) for point in given_points if point.version == newest[point.series]
    }
    for (name, cell), point in content.items():
        alike = [p for p in given_points if (p.series, p.cell, p.version) == (name, cell, newest[name])]
        whole = [value for p in alike if not p.hasty for value in p.samples]
        assert list(point.samples) == (whole or [value for p in alike for value in p.samples])
        assert (point.series, point.cell, point.version) == (name, cell, newest[name])
    assert merge_points(list(content.values())) == content


@given(st.lists(some_points, max_size=12).flatmap(lambda some: st.tuples(st.just(some), st.permutations(some))))
def test_the_order_of_runs_changes_no_samples(orders: tuple[list[Point], list[Point]]) -> None:
    series = [Series(name, "x", "time", "seconds", (), (), "1.1") for name in ("x.X.track_time", "y.Y.track_time")]
    current = {point.series for point in orders[0] if point.version == "1.1"}
    first, second = (
        {key: point for key, point in merge_points(some, series).items() if key[0] in current} for some in orders
    )
    assert {key: sorted(point.samples) for key, point in first.items()} == {
        key: sorted(point.samples) for key, point in second.items()
    }
    assert all(point.version == "1.1" for point in first.values())


def of_ranks(ranks: int, **facts: Scalar) -> Run:
    device = replace(CPU, ranks=ranks)
    grid = list_grid_cells(workloads.get("collective"), replace(CPU, ranks=2), None)
    params = next(params for params, cell in grid.items() if cell[0] == "all_reduce")
    asked = case("bf16", params, "collective", ranks=ranks)
    sent = Transfer(4e6, 2e6, 3e6, 1.0, counted=False)
    record = Record(asked, NATIVE, Status.OK, timing=rounds(("communication",), [(1,)]), transfer=sent)
    return run_of([record], devices=(device,), environment=Environment(facts))


def test_ranks_are_part_of_a_cell() -> None:
    content = extract_history_points(of_ranks(2))
    assert {point.cell for point in content.points} == {("bf16", "all_reduce", "2 gloo")}
    values = {metric_of_point(point): point.samples for point in content.points}
    assert values["wire_bytes"] == (3e6,) and values["time"] == pytest.approx((1e-3,))
    assert not {"energy", *COUNTS} & values.keys()
    for ranks, words in ((4, "4 ranks"), (1, "1 rank")):
        content = extract_history_points(of_ranks(ranks))
        assert not content.points and content.untracked_cases == 1
        assert content.why == f"it was measured by {words}, but the history of collective tracks 2, 8"
    alone = extract_history_points(
        run_of([record for record in RECORDS if record.timing], devices=(replace(CPU, ranks=2),))
    )
    assert alone.why == "it was measured by 2 ranks, but the history of gemm tracks 1"
