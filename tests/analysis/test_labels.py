"""Every label once on and once off, from hand-built samples."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from fp8bench.analysis.findings import findings
from fp8bench.analysis.labels import (
    MIN_DISTURBED_RATIO,
    POSSIBLY_HARD_LABELS,
    STARVED_RATIO,
    LabelWithReason,
    collect_hard_labels,
    collect_labels,
    count_disturbed_slots,
    is_contended,
    label_clock_limits,
    label_in_process_cases,
)
from fp8bench.model import (
    Case,
    DeviceWatch,
    EnergyUse,
    EnergyWindow,
    Finding,
    Interval,
    Label,
    Level,
    Record,
    Segments,
    SlotSample,
    Timing,
    Verdict,
)
from fp8bench.model.words import LABELS_OF_OTHER_WORK, REMARK_LABELS
from tests.counts import for_each
from tests.fakes import MS, record, steady, timing
from tests.runs import run_of

CALM = steady(10 * MS, 24)


def labels(one: Record, reference: Timing | None = CALM, **finding: Any) -> tuple[Label, ...]:
    return tuple(found.label for found in labelled(one, reference, **finding))


def labelled(
    one: Record, reference: Timing | None = CALM, aa: Interval | None = None, **finding: Any
) -> tuple[LabelWithReason, ...]:
    phases = finding.pop("phases", (("gemm", 1e-2),))
    return collect_labels(one, Finding(one.case, Verdict.UNSURE, phases=phases, **finding), reference, aa)


def clocks(wall: Sequence[float], cpu: float = 0.01, host: float = 0.0, timing_: Timing = CALM) -> Timing:
    """The same samples with other host and process clocks per slot."""
    slots = [
        replace(slot, wall_seconds=wall[number % len(wall)], cpu_seconds=cpu, host_seconds=host)
        for number, slot in enumerate(timing_.slots)
    ]
    return replace(timing_, slots=tuple(slots))


def rising(share: float, rounds: int = 24) -> Timing:
    """A linear rise from 10 ms by `share`."""
    return timing(*[(round(10 * MS * (1 + share * number / (rounds - 1))),) for number in range(rounds)])


SHORT = (("cast", 1e-6), ("gemm", 2e-6), ("attention", 0.0))


@for_each(
    ("label", "one", "finding", "on"),
    [
        # The A/A interval extends beyond 3%.
        (Label.NOISY, record(CALM), {"floor": 0.031}, True),
        (Label.NOISY, record(CALM), {"floor": 0.03}, False),
        # Everything that took time is too short for its markers.
        (Label.BELOW_FLOOR, record(CALM), {"phases": SHORT, "below_floor": ("cast", "gemm")}, True),
        (Label.BELOW_FLOOR, record(CALM), {"phases": (SHORT[0], ("gemm", 2e-3)), "below_floor": ("cast",)}, False),
        # Wide but continuous, so not bimodal.
        (Label.BIMODAL, record(rising(0.5)), {"reference": rising(0.5)}, False),
        # Up and down again: the ends differ, without a trend.
        (Label.DRIFT, record(timing(*[(10 * MS,), (12 * MS,)] * 12)), {}, False),
        # Too few rounds for a first look; a time is a rate here.
        (Label.FEW_SAMPLES, record(steady(10 * MS, 23)), {}, True),
        (Label.FEW_SAMPLES, record(steady(10 * MS, 8), level=Level.EMULATED), {}, False),
        # It shared no rounds with the reference.
        (Label.UNPAIRED, record(CALM, paired=False), {}, True),
        # The phase marks differ between calls.
        (Label.VARYING, record(replace(CALM, varying=True)), {}, True),
    ],
)
def test_each_label_has_its_condition(label: Label, one: Record, finding: dict[str, Any], on: bool) -> None:
    assert (label in labels(one, **finding)) == on and labels(record(CALM)) == ()


@for_each(
    ("wall", "device", "reason", "hard"),
    [
        (0.0111, "cpu", "24 of 24 slots", False),
        (0.0501, "cpu", "less than a fifth of a core in 24 of 24 slots", True),
        (0.0109, "cpu", None, False),
        (0.0501, "cuda:0", None, False),
    ],
)
def test_disturbed_slots_are_labelled(wall: float, device: str, reason: str | None, hard: bool) -> None:
    expected = [LabelWithReason(Label.CONTENDED, reason, hard)] if reason else []
    found = labelled(record(clocks((wall,)), device=device))
    assert [one for one in found if one.label is Label.CONTENDED] == expected


@for_each(
    ("host", "device", "reason", "hard"),
    [
        (0.0051, "cuda:0", "the host took 51% of the time that the device did", False),
        (0.0096, "cuda:0", "the host took as long as the device did", True),
        (0.0049, "cuda:0", None, False),
        (0.0096, "cpu", None, False),
    ],
)
def test_a_step_that_the_host_limits_is_labelled(host: float, device: str, reason: str | None, hard: bool) -> None:
    timing = clocks((0.01,), host=host)
    expected = [LabelWithReason(Label.LAUNCH_BOUND, reason, hard)] if reason else []
    assert [label for label in labelled(record(timing, device=device)) if label.label is Label.LAUNCH_BOUND] == expected
    assert collect_hard_labels(timing, None, None, device) == tuple(one for one in expected if hard)


@for_each(
    ("low", "high", "rounds", "on"),
    [
        (1.02, 1.05, 10, True),
        (1.0199, 1.05, 24, False),
        (0.95, 0.98, 24, True),
        (0.95, 0.9801, 24, False),
        (0.9, 1.1, 24, False),
        (1.02, 1.05, 9, False),
    ],
)
def test_an_aa_interval_far_from_one_is_labelled(low: float, high: float, rounds: int, on: bool) -> None:
    found = labelled(record(steady(10 * MS, rounds)), aa=Interval(1.03, low, high, 0.99))
    expected = [LabelWithReason(Label.AA_FAILED, f"A/A 1.030x [{low:.3f}, {high:.3f}]", True)] if on else []
    assert [one for one in found if one.label is Label.AA_FAILED] == expected


def test_limits_of_device_energy_and_memory_are_labelled() -> None:
    watch = DeviceWatch(3, 10.0, 0x4 | 0x20, sm_clock=1.41e9)
    found = labelled(record(CALM, device="cuda:0", watch=watch))
    assert found == (
        LabelWithReason(Label.THROTTLED, "sw-thermal"),
        LabelWithReason(Label.POWER_CAPPED, "SM clock 1.41 GHz"),
    )
    hot = labelled(record(CALM, device="cuda:0", watch=replace(watch, throttle=0x4 | 0x40, sm_clock=None)))
    assert hot == (LabelWithReason(Label.THROTTLED, "hw-thermal", True), LabelWithReason(Label.POWER_CAPPED))
    assert labelled(record(CALM, device="cuda:0", watch=DeviceWatch(3, 10.0, 0x1))) == ()
    unsure = EnergyUse("counter", (EnergyWindow(10, 1.0, 10.0, 12, 0.02),), 1.0, 1.0)
    for level in (Level.NATIVE, Level.EMULATED):
        found = labelled(record(CALM, level=level, energy=unsure))
        assert [(one.label, one.hard) for one in found] == [(Label.ENERGY_UNRESOLVED, False)] and found[0].reason
    assert labels(record(CALM, energy=EnergyUse("none", why="no counter"))) == ()
    for retries in (None, 0):
        slots = tuple(replace(slot, memory_retries=retries) for slot in CALM.slots)
        assert Label.MEMORY_FULL not in labels(record(timing=replace(CALM, slots=slots)))
    slots = (*slots[:3], replace(slots[3], memory_retries=2), replace(slots[4], memory_retries=1), *slots[5:])
    (found,) = (
        label for label in labelled(record(timing=replace(CALM, slots=slots))) if label.label is Label.MEMORY_FULL
    )
    assert (
        found == LabelWithReason(Label.MEMORY_FULL, "torch released memory 3 times, in 2 of 24 slots")
        and found.label.casts_doubt
    )


@for_each(
    ("fast", "slow", "slow_rounds", "level", "on"),
    [
        (10 * MS, 12 * MS, 12, Level.NATIVE, True),
        (10 * MS, 12 * MS, 5, Level.NATIVE, True),
        (10 * MS, 12 * MS, 4, Level.NATIVE, False),
        (10 * MS, 10 * MS + 500_000, 12, Level.NATIVE, False),
        (10 * MS, 10 * MS + 520_000, 12, Level.NATIVE, True),
        (10 * MS, 12 * MS, 12, Level.EMULATED, False),
    ],
)
def test_two_clusters_of_times_are_labelled(fast: int, slow: int, slow_rounds: int, level: Level, on: bool) -> None:
    slots = [(slow,) if number < slow_rounds else (fast,) for number in range(24)]
    slots = slots[::2] + slots[1::2]
    assert (Label.BIMODAL in labels(record(timing(*slots), level=level), timing(*slots))) == on


@for_each(
    ("case", "reference", "options", "on"),
    [
        (rising(0.04), CALM, {}, True),
        (CALM, rising(0.04), {}, True),
        (rising(0.04), rising(0.04), {}, False),
        (rising(0.028), CALM, {}, False),
        (rising(0.030), CALM, {}, True),
        (rising(0.04, 15), CALM, {}, False),
        (rising(0.04, 16), CALM, {}, True),
        (rising(0.04), None, {}, False),
        (rising(0.04), CALM, {"paired": False}, False),
        (rising(0.04), CALM, {"is_reference": True}, False),
        (rising(0.04), CALM, {"level": Level.EMULATED}, False),
    ],
)
def test_a_drifting_ratio_is_labelled(
    case: Timing, reference: Timing | None, options: dict[str, object], on: bool
) -> None:
    assert (Label.DRIFT in labels(record(case, **options), reference)) == on  # type: ignore[arg-type]


@for_each("device", ["cpu", "cuda:0"])
@for_each("level", [Level.NATIVE, Level.EMULATED])
def test_eager_quantisers_are_labelled(level: Level, device: str) -> None:
    """Some cast ran eagerly, for whatever reason; emulated cases get the label too.

    On a GPU it would slow a native format: no verdict.
    """
    eager = replace(CALM, eager="--quick compiles nothing")
    hard = level is Level.NATIVE and device == "cuda:0"
    wanted = LabelWithReason(Label.EAGER_QUANTISER, "--quick compiles nothing", hard)
    assert wanted in labelled(record(eager, level=level, device=device))
    assert Label.EAGER_QUANTISER not in labels(record(replace(CALM, fused=True), level=level))


WALL = 0.010


def clocked(*slots: tuple[float, float | None, int | None, float | None]) -> Timing:
    """10 ms slots with CPU time of process and step thread as shares, preemptions, and stolen seconds."""
    samples = [
        SlotSample(
            number,
            ((10_000_000,),),
            WALL,
            process * WALL,
            thread_seconds=None if thread is None else thread * WALL,
            preemptions=preempted,
            stolen_seconds=stolen,
        )
        for number, (process, thread, preempted, stolen) in enumerate(slots)
    ]
    return Timing(Segments(("gemm",), (0,)), tuple(samples))


MIN_CHANGE_OF_FEW_RUNS = (1.0, 1.0, 0, 0.0)
LATE = (0.8, 0.8, 2, 0.0)


@for_each(
    ("process", "ahead", "on"),
    [
        (0.92, MIN_DISTURBED_RATIO, False),
        (0.90, MIN_DISTURBED_RATIO, True),
        (0.21, STARVED_RATIO, False),
        (0.19, STARVED_RATIO, True),
    ],
)
@for_each("counted", [(None, None, None), (0.3, 0, 0.0), (0.3, None, None)])
def test_the_process_time_shows_a_disturbed_slot(
    process: float, ahead: float, on: bool, counted: tuple[float | None, int | None, float | None]
) -> None:
    assert is_contended(clocked(*[(process, *counted)] * 8), ahead) == on


@for_each(("late", "on"), [(4, False), (5, True), (8, True), (0, False)])
def test_most_slots_must_be_disturbed(late: int, on: bool) -> None:
    timing = clocked(*[LATE] * late, *[MIN_CHANGE_OF_FEW_RUNS] * (8 - late))
    assert is_contended(timing) == on and count_disturbed_slots(timing, MIN_DISTURBED_RATIO) == late
    assert not is_contended(replace(timing, slots=()))


@for_each(
    ("thread", "preempted", "stolen", "on"),
    [
        (0.8, 1, None, True),
        (0.8, 0, 0.0, False),
        (0.92, 5, 0.1, False),
        (None, 5, 0.1, False),
        (0.8, 0, 0.001, True),
        (0.8, None, 0.001, True),
        (0.8, 0, 0.0009, False),
    ],
)
def test_with_several_threads_the_step_threads_time_counts(
    thread: float | None, preempted: int | None, stolen: float | None, on: bool
) -> None:
    """Spinning threads give the process more CPU time than wall time, which hides waiting.

    The step thread's waiting counts only if another program took a core: here 2 ms per slot, of which half counts.
    """
    assert is_contended(clocked(*[(1.8, thread, preempted, stolen)] * 8)) == on
    far = [is_contended(clocked(*[(1.3, share, 4, None)] * 8), STARVED_RATIO) for share in (0.19, 0.21)]
    assert far == [True, False]  # independent of the neighbours' load
    # Preemptions in slots without delay are not evidence: the delays in other slots are its fault.
    mixed = clocked(*[(1.8, 0.8, 0, 0.0)] * 5, *[(1.8, 1.0, 3, 0.0)] * 3)
    assert not is_contended(mixed) and count_disturbed_slots(mixed, MIN_DISTURBED_RATIO) == 0


def test_stolen_time_is_pooled_over_slots() -> None:
    assert is_contended(clocked((1.8, 0.8, 0, 0.01), *[(1.8, 0.8, 0, 0.0)] * 7))
    assert not is_contended(clocked((1.8, 0.4, 0, 0.01), *[(1.8, 0.4, 0, 0.0)] * 7))


FINDING = Finding(Case("gemm", (), "bf16", "cpu"), Verdict.FASTER)


def test_remarks_cast_no_doubt_on_the_speed() -> None:
    assert {Label.POWER_CAPPED, Label.WHOLE_STEPS, Label.ENERGY_UNRESOLVED, Label.REPLAY_PACE} == REMARK_LABELS
    assert not FINDING.doubtful and not replace(FINDING, labels=tuple(REMARK_LABELS)).doubtful
    assert not REMARK_LABELS & POSSIBLY_HARD_LABELS
    for label in set(Label) - REMARK_LABELS:
        finding = replace(FINDING, labels=(*REMARK_LABELS, label))
        assert label.casts_doubt and finding.doubtful and finding.verdict_words == "perhaps faster"


@for_each("label", sorted(set(Label) - REMARK_LABELS))
@for_each(
    ("point", "floor", "large"),
    [
        (1.72, 0.07, True),
        (0.58, 0.07, True),
        (1.22, 0.07, False),
        (0.82, 0.07, False),
        (1.04, 0.01, True),
        (1.72, None, False),
    ],
)
def test_a_large_effect_outweighs_disturbances(label: Label, point: float, floor: float | None, large: bool) -> None:
    ratio = Interval(point, 0.97 * point, 1.03 * point, 0.99)
    finding = replace(FINDING, verdict=Verdict.SLOWER, ratio=ratio, floor=floor, labels=(label,))
    assert finding.doubtful == (not large or label in LABELS_OF_OTHER_WORK)
    assert finding.doubts(replace(ratio, point=1.001)) and finding.doubts(None)


@for_each(
    ("origin", "isolation", "told"), [("profile", False, True), ("profile", True, False), ("suite", False, False)]
)
def test_a_profile_in_the_process_that_asked_is_labelled(origin: str, isolation: bool, told: bool) -> None:
    run = run_of([record(CALM)])
    run = replace(run, origin=origin, request=replace(run.request, isolation=isolation))
    assert all((Label.IN_PROCESS in finding.labels) == told for finding in findings(run).values())
    assert (not label_in_process_cases(run)) != told


CHOSEN = 0x1 | 0x2 | 0x4 | 0x10 | 0x100


def watch(throttle: int | None = 0, seconds: float = 10.0, **held: float) -> DeviceWatch:
    """Readings with these throttle bits, and seconds per limit ('hw_thermal' is hw-thermal)."""
    named = tuple((name.replace("_", "-"), value) for name, value in held.items())
    return DeviceWatch(5, seconds, throttle, named)


@for_each(
    ("one", "reasons", "hard"),
    [
        (None, (), False),
        (watch(None), (), False),
        (watch(0), (), False),
        (watch(CHOSEN), (), False),
        (watch(CHOSEN | 0x8), ("hw-slowdown",), True),
        (watch(0x20), ("sw-thermal",), False),
        (watch(0x40), ("hw-thermal",), True),
        (watch(0x80), ("hw-power-brake",), True),
        (watch(0x20 | 0x40), ("sw-thermal", "hw-thermal"), True),
        (watch(0x200), ("board-limit",), False),
        (watch(0x400 | 0x2), ("reliability",), False),
        (watch(0x800), ("bit 0x800",), False),
        (watch(hw_thermal=0.05), (), False),
        (watch(hw_thermal=0.06), ("hw-thermal 0.6% of the time",), True),
        (watch(hw_power_brake=1.24), ("hw-power-brake 12% of the time",), True),
        (watch(sw_thermal=5.0), ("sw-thermal 50% of the time",), False),
        (watch(thermal=5.0), ("thermal 50% of the time",), True),
        (watch(thermal=5.0, sw_thermal=5.0), ("sw-thermal 50% of the time",), False),
        (watch(thermal=5.0, sw_thermal=4.96), ("sw-thermal 50% of the time",), False),
        (watch(thermal=5.0, sw_thermal=4.9), ("sw-thermal 49% of the time",), True),
        (watch(thermal=5.0, hw_thermal=5.0), ("hw-thermal 50% of the time",), True),
        (watch(power_cap=9.0), (), False),
        (watch(0x40, hw_thermal=1.0), ("hw-thermal 10% of the time",), True),
        (watch(0x20, hw_thermal=1.0), ("sw-thermal", "hw-thermal 10% of the time"), True),
        (watch(None, sw_thermal=11.0), ("sw-thermal 100% of the time",), False),
        (watch(seconds=0.0, hw_thermal=1.0), (), False),
    ],
)
def test_throttled_clocks_are_labelled(one: DeviceWatch | None, reasons: tuple[str, ...], hard: bool) -> None:
    """Bits 0x8, 0x40 and 0x80 are the hardware's; chosen clocks and the power cap do not count.

    Counters count above 0.5% of the time, 0.05 s here.
    'thermal' covers both kinds; what software does not explain is the hardware's.
    """
    expected = [LabelWithReason(Label.THROTTLED, ", ".join(reasons), hard)] if reasons else []
    assert [found for found in label_clock_limits(one) if found.label is Label.THROTTLED] == expected


@for_each(
    ("one", "on"),
    [
        (None, False),
        (watch(None), False),
        (watch(0x8), False),
        (watch(0x4), True),
        (watch(0x44), True),
        (watch(power_cap=0.05), False),
        (watch(power_cap=0.051), True),
    ],
)
def test_a_power_cap_is_labelled(one: DeviceWatch | None, on: bool) -> None:
    assert (Label.POWER_CAPPED in [found.label for found in label_clock_limits(one)]) == on


def test_the_label_names_the_clock() -> None:
    for hertz, words in (
        (1.41e9, "SM clock 1.41 GHz"),
        *((unknown, "") for unknown in (None, 0.0, math.nan, math.inf)),
    ):
        assert list(label_clock_limits(DeviceWatch(1, 1.0, 0x4, sm_clock=hertz))) == [
            LabelWithReason(Label.POWER_CAPPED, words)
        ]
