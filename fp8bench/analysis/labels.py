"""Labels that cast doubt on a case, from its samples, its clocks and the driver of its device."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from fp8bench import units
from fp8bench.analysis import stats
from fp8bench.analysis.energy import explain_unresolved_energy, phase_energies
from fp8bench.analysis.verdicts import MIN_ROUNDS_FOR_VERDICT, SAME_BAND, is_uneven, step_seconds_of_calls
from fp8bench.model import DeviceWatch, Finding, Interval, Label, Record, Run, Scalar, SlotSample, Timing
from fp8bench.model.consumed import (
    HARDWARE_THROTTLE_BITS,
    HARMLESS_THROTTLE_REASONS,
    POWER_CAP_BIT,
    THROTTLE_REASONS,
    list_throttle_reasons,
)
from fp8bench.model.run import BUSY_CORES_FACT, PROFILE_ORIGIN
from fp8bench.model.stopping import LEAST_ROUNDS

# Only these labels can be hard, which removes the verdict. All other labels only cast doubt.
POSSIBLY_HARD_LABELS = frozenset(
    {
        Label.AA_FAILED, Label.ABOVE_CEILING, Label.WORK_MISMATCH, Label.FALLBACK, Label.NO_WORK, Label.CONTENDED,
        Label.THROTTLED, Label.LAUNCH_BOUND, Label.UNEVEN, Label.CLOCK_OFFSET, Label.EAGER_QUANTISER,
        Label.OTHER_INPUTS, Label.HANDICAP,
    }
)  # fmt: skip


@dataclass(frozen=True)
class LabelWithReason:
    """A label with its reason. A `hard` label removes the verdict."""

    label: Label
    reason: str = ""
    hard: bool = False

    def __post_init__(self) -> None:
        if self.hard and self.label not in POSSIBLY_HARD_LABELS:
            raise ValueError(f"{self.label} cannot remove a verdict: {', '.join(sorted(POSSIBLY_HARD_LABELS))} can")


# Throttling below this share of the time is ignored.
MIN_THROTTLED_SHARE = 0.005
_HARDWARE_THROTTLE_REASONS = frozenset({"hw-thermal", "hw-power-brake"})
# Limits of a slot's wall-clock time divided by its CPU time. Above the first limit, the slot is disturbed. Above the
# second, its process had less than a fifth of a core, so even the fastest rounds may be disturbed.
MIN_DISTURBED_RATIO = 1.1
STARVED_RATIO = 5.0
# A case is contended if more than this share of its slots is disturbed.
MIN_CONTENDED_SLOT_SHARE = 0.5
# A delay is attributed to the hypervisor if the hypervisor took the core for at least this share of it.
_STOLEN_SHARE = 0.5


def count_disturbed_slots(timing: Timing, ratio: float) -> int:
    """Counts the slots (timed turns of a case) whose wall-clock time exceeds their CPU time by more than this ratio.

    With one thread, the CPU time of the process shows a delay. With several threads, those that wait for a late thread
    spin, which counts as CPU time. So the CPU time of the thread that runs the steps is checked as well. That thread
    also sleeps until the others finish, so its delay counts only if the system reports that its core was taken.
    Communication between ranks is subtracted, because a waiting rank needs no core.
    """
    late_processes, late_threads = 0, []
    for slot in timing.slots:
        seconds = _compute_expected_core_time(slot)
        if seconds > ratio * slot.cpu_seconds:
            late_processes += 1
        if slot.thread_seconds is not None and seconds > ratio * slot.thread_seconds:
            late_threads.append(slot)
    return max(late_processes, len(late_threads) if _was_preempted(late_threads) else 0)


def have_too_few_undisturbed_rounds(*timings: Timing) -> bool:
    """Returns whether any timing has fewer undisturbed slots than its best case uses."""
    return any(
        len(timing.slots) - count_disturbed_slots(timing, MIN_DISTURBED_RATIO)
        < stats.count_fastest_rounds(len(timing.slots))
        for timing in timings
        if timing.slots
    )


# The load average may exceed the cores in use by this much, because it still includes the threads of the previous
# run.
_LOAD_AVERAGE_MARGIN = 0.25
# The machine is busy if at least _MIN_BUSY_CORES cores are busy, and at least _MIN_BUSY_CORES_SHARE of all cores. It is
# also busy if other programs took a core in more than _MIN_DISTURBED_SLOTS_SHARE of the slots.
_MIN_BUSY_CORES, _MIN_BUSY_CORES_SHARE, _MIN_DISTURBED_SLOTS_SHARE = 0.5, 0.25, 0.2


def describe_run_load(run: Run) -> str:
    """Returns the load of the machine, like 'load 3.1 on 2 cores, 1.9 busy at the start'. Returns '' if the load was
    low or is unknown.
    """
    facts = run.environment.facts
    load, cores, busy_cores = (read_positive_fact(facts, name) for name in ("load_1min", "cpu_count", BUSY_CORES_FACT))
    if not cores:
        return ""
    threads, words = run.request.threads, [f"load {load:g} on {cores:g} cores"]
    if busy_cores:
        words.append(f"{busy_cores:g} busy at the start")
    # Only the slots of CPU cases show other programs: the host of a GPU always waits for the device.
    timings = [record.timing for record in run.records if record.timing and record.case.device.startswith("cpu")]
    timed_slot_count = sum(len(timing.slots) for timing in timings)
    disturbed_slot_count = sum(count_disturbed_slots(timing, MIN_DISTURBED_RATIO) for timing in timings)
    disturbed_slot_share = disturbed_slot_count / max(1, timed_slot_count)
    if disturbed_slot_share > _MIN_DISTURBED_SLOTS_SHARE:
        words.append(f"{units.percent(disturbed_slot_share, 0)} of the slots disturbed")
    is_machine_loaded = load > max(threads, cores - threads) + _LOAD_AVERAGE_MARGIN
    are_cores_busy = busy_cores >= max(_MIN_BUSY_CORES, _MIN_BUSY_CORES_SHARE * cores)
    return (
        ", ".join(words)
        if is_machine_loaded or are_cores_busy or disturbed_slot_share > _MIN_DISTURBED_SLOTS_SHARE
        else ""
    )


def read_positive_fact(facts: Mapping[str, Scalar | None], name: str) -> float:
    """Returns a positive number among a run's facts, or 0 if the fact is missing."""
    value = facts.get(name)
    return value if isinstance(value, int | float) and 0 < value < math.inf else 0.0


def _compute_expected_core_time(slot: SlotSample) -> float:
    """Returns for how many seconds of a slot the process should have had a core. With several ranks, the communication
    time of the slowest rank is subtracted.
    """
    slowest_rank = max(slot.ranks, key=lambda rank: sum(rank.step_ns), default=None)
    return slot.wall_seconds - (0.0 if slowest_rank is None else sum(slowest_rank.communication_ns) * 1e-9)


def is_contended(timing: Timing, ratio: float = MIN_DISTURBED_RATIO) -> bool:
    return count_disturbed_slots(timing, ratio) > MIN_CONTENDED_SLOT_SHARE * len(timing.slots)


def _was_preempted(slots: Sequence[SlotSample]) -> bool:
    """Returns whether other programs took a core in these slots (timed turns of a case). They did if the thread lost
    its core once per slot on average, or if the hypervisor took at least half of the time in which the thread did not
    run.

    All slots are pooled, because stolen time is counted in steps of 10 ms, which may be longer than a slot.
    """
    preemptions = sum(slot.preemptions or 0 for slot in slots)
    stolen_seconds = sum(slot.stolen_seconds or 0.0 for slot in slots)
    off_core_seconds = sum(slot.wall_seconds - (slot.thread_seconds or 0.0) for slot in slots)
    return bool(slots) and (preemptions >= len(slots) or stolen_seconds >= _STOLEN_SHARE * off_core_seconds)


# Limits of the labels noisy, drift and bimodal. `_has_ratio_drift` and `_is_bimodal` explain the last two.
MAX_NOISE_FLOOR = 0.03
MIN_DRIFT_CORRELATION = 0.6
MIN_DRIFT_LOG_RATIO = 0.02
_MIN_ROUNDS_FOR_DRIFT = 16
BIMODAL_VARIANCE_SHARE = 0.9
BIMODAL_GAP = 0.05
BIMODAL_MIN_CLUSTER_SHARE = 0.2


def collect_labels(
    record: Record,
    finding: Finding,
    reference: Timing | None,
    aa: Interval | None,
    claims: Sequence[LabelWithReason] = (),
) -> tuple[LabelWithReason, ...]:
    """Returns all labels of a case in the order of Label, including `claims` from other checks.

    `reference` is the reference's timing in the case's rounds. `aa` is the interval of the reference against its
    control in these rounds.
    """
    timing = record.timing
    assert timing is not None
    labels = [
        *_label_round_doubts(record, timing, finding, aa),
        *_label_time_distribution(record, timing, finding, reference),
        *_check_device(record, finding),
        *_label_doubtful_step(record, timing),
        *claims,
    ]
    return tuple(sorted(labels, key=lambda labelled: list(Label).index(labelled.label)))


def collect_hard_labels(
    timing: Timing, watch: DeviceWatch | None, aa: Interval | None, device: str
) -> tuple[LabelWithReason, ...]:
    """Returns the hard labels of a case from its samples, its clock and the A/A interval (of identical code). They
    remove the verdicts of the case and, if it is a reference, of all cases compared with it.
    """
    labels = [
        *_label_failed_aa_interval(aa, timing.num_rounds),
        *_label_contention(timing, device),
        *label_clock_limits(watch),
        *_label_host_bound(timing, device),
    ]
    return tuple(label for label in labels if label.hard)


def label_in_process_cases(run: Run) -> tuple[LabelWithReason, ...]:
    """Labels all cases of a profile that did not run in a separate process."""
    return (LabelWithReason(Label.IN_PROCESS),) if run.origin == PROFILE_ORIGIN and not run.request.isolation else ()


def _label_round_doubts(
    record: Record, timing: Timing, finding: Finding, aa: Interval | None
) -> Iterator[LabelWithReason]:
    """Yields labels that cast doubt on the rounds: noise, other programs on the machine, and overhead of the host."""
    yield from _label_failed_aa_interval(aa, timing.num_rounds)
    yield from _label_contention(timing, record.case.device)
    yield from _label_host_bound(timing, record.case.device)
    if finding.floor is not None and finding.floor > MAX_NOISE_FLOOR:
        yield LabelWithReason(Label.NOISY)
    if not record.paired:
        yield LabelWithReason(Label.UNPAIRED)
    if set(finding.below_floor) >= {phase for phase, seconds in finding.phases if seconds > 0}:
        yield LabelWithReason(Label.BELOW_FLOOR)


def _label_time_distribution(
    record: Record, timing: Timing, finding: Finding, reference: Timing | None
) -> Iterator[LabelWithReason]:
    """Yields labels for suspicious distributions of the times of calls and rounds."""
    # The time of an emulated case never counts as speed.
    if record.support.is_emulated:
        return
    if timing.num_rounds < LEAST_ROUNDS:
        yield LabelWithReason(Label.FEW_SAMPLES)
    if _is_bimodal(timing):
        yield LabelWithReason(Label.BIMODAL)
    yield from _label_uneven_calls(finding)
    if reference is not None and not record.is_reference and record.paired and _has_ratio_drift(timing, reference):
        yield LabelWithReason(Label.DRIFT)


def _check_device(record: Record, finding: Finding) -> Iterator[LabelWithReason]:
    """Yields labels for limits that the driver reports, and for unreliable energy figures."""
    yield from label_shared_device(record.watch)
    yield from label_clock_limits(record.watch)
    if reason := explain_unresolved_energy(record.energy):
        yield LabelWithReason(Label.ENERGY_UNRESOLVED, reason)
    phases = phase_energies(record, finding)
    if phases is not None and phases.pace_mismatch_text:
        yield LabelWithReason(Label.REPLAY_PACE, phases.pace_mismatch_text)


def _label_doubtful_step(record: Record, timing: Timing) -> Iterator[LabelWithReason]:
    """Yields labels that cast doubt on the step: varying work, uncompiled casts, full memory, leaks, and values that
    are not finite.
    """
    if timing.varying:
        yield LabelWithReason(Label.VARYING)
    if timing.eager:
        # On a GPU, casts to native formats are part of the compared time, so uncompiled casts remove the verdict. On a
        # CPU, casts are emulated.
        has_native_casts = record.support.is_native and record.case.device != "cpu"
        yield LabelWithReason(Label.EAGER_QUANTISER, timing.eager, hard=has_native_casts)
    # torch releases unused memory only after the device is idle, which delays the step.
    retry_counts = [slot.memory_retries for slot in timing.slots if slot.memory_retries]
    if retry_counts:
        yield LabelWithReason(
            Label.MEMORY_FULL,
            f"torch released memory {sum(retry_counts)} times, in {len(retry_counts)} of {len(timing.slots)} slots",
        )
    if record.memory is not None and record.memory.leak:
        yield LabelWithReason(Label.LEAK, f"{units.size(record.memory.leak)} a step")
    if record.not_finite:
        yield LabelWithReason(Label.NOT_FINITE, f"{units.share(record.not_finite)} of the state")


def _label_uneven_calls(finding: Finding) -> Iterator[LabelWithReason]:
    """Labels a case whose ratio to the reference differs between the mean over all calls and the fastest calls. The
    label removes the verdict, unless both ratios certainly show a faster case, or both a slower one.
    """
    ratio, mean_ratio = finding.ratio, finding.typical
    if ratio is None or mean_ratio is None or not is_uneven(ratio, mean_ratio):
        return
    are_both_ratios_faster = ratio.high < 1 and mean_ratio.high < 1
    are_both_ratios_slower = ratio.low > 1 and mean_ratio.low > 1
    reason = f"against the reference, the mean is {units.change(mean_ratio.point / ratio.point)} off the fastest calls"
    yield LabelWithReason(Label.UNEVEN, reason, hard=not (are_both_ratios_faster or are_both_ratios_slower))


def _label_failed_aa_interval(aa: Interval | None, rounds: int) -> Iterator[LabelWithReason]:
    """Labels a case whose reference and control differ too much, although both run identical code."""
    if aa is not None and rounds >= MIN_ROUNDS_FOR_VERDICT and aa.distance_from_one >= SAME_BAND:
        low, high = (units.ratio(interval_end).removesuffix("x") for interval_end in (aa.low, aa.high))
        yield LabelWithReason(Label.AA_FAILED, f"A/A {units.ratio(aa.point)} [{low}, {high}]", hard=True)


def _label_contention(timing: Timing, device: str) -> Iterator[LabelWithReason]:
    """Labels a CPU case that other programs disturbed. Cases on a GPU are not labelled: their host always waits for the
    device, so its CPU time shows no disturbance.
    """
    if not device.startswith("cpu") or not is_contended(timing):
        return
    is_cpu_starved = is_contended(timing, STARVED_RATIO)
    disturbed_slot_count = count_disturbed_slots(timing, STARVED_RATIO if is_cpu_starved else MIN_DISTURBED_RATIO)
    disturbed_slots_text = f"{disturbed_slot_count} of {len(timing.slots)} slots"
    yield LabelWithReason(
        Label.CONTENDED,
        f"less than a fifth of a core in {disturbed_slots_text}" if is_cpu_starved else disturbed_slots_text,
        is_cpu_starved,
    )


# Limits for the host's time to enqueue a step, divided by the device's time to run it. Above the first limit, the
# device may wait for the host. Above the second limit, the host sets the time of consecutive steps, however fast the
# device is.
HOST_MAY_LIMIT_SHARE = 0.5
HOST_LIMITS_SHARE = 0.95


def compute_host_share(timing: Timing, device: str) -> float:
    """Returns the host's time to enqueue a step divided by the time of the step. Returns 0 on a CPU."""
    if device.startswith("cpu"):
        return 0.0
    host_seconds = np.median([slot.host_seconds for slot in timing.slots])
    step_seconds = np.median(step_seconds_of_calls(timing))
    return float(host_seconds / step_seconds) if step_seconds > 0 else math.inf


def _label_host_bound(timing: Timing, device: str) -> Iterator[LabelWithReason]:
    """Labels a step whose time may be set by the host. If the host certainly sets it, the label removes the verdict,
    because the device may be faster than the measured time.
    """
    host_share = compute_host_share(timing, device)
    if host_share > HOST_MAY_LIMIT_SHARE:
        is_certain = host_share > HOST_LIMITS_SHARE
        reason = (
            "the host took as long as the device did"
            if is_certain
            else f"the host took {units.percent(host_share, 0)} of the time that the device did"
        )
        yield LabelWithReason(Label.LAUNCH_BOUND, reason, hard=is_certain)


def _find_fastest_calls_by_round(timing: Timing) -> dict[int, float]:
    return {slot.round: min(sum(call) for call in slot.calls_ns) * 1e-9 for slot in timing.slots}


def _is_bimodal(timing: Timing) -> bool:
    """Returns whether the fastest calls form two clusters at least 5% apart, each with at least a fifth of the
    rounds.
    """
    fastest_calls = np.array(list(_find_fastest_calls_by_round(timing).values()))
    explained_share, lower_count = stats.split_into_two_clusters(np.sort(fastest_calls))
    smaller_cluster_share = min(lower_count, len(fastest_calls) - lower_count) / len(fastest_calls)
    is_time_range_wide = float(np.ptp(fastest_calls)) > BIMODAL_GAP * float(np.median(fastest_calls))
    return (
        is_time_range_wide
        and explained_share > BIMODAL_VARIANCE_SHARE
        and smaller_cluster_share >= BIMODAL_MIN_CLUSTER_SHARE
    )


def _has_ratio_drift(timing: Timing, reference: Timing) -> bool:
    """Returns whether the ratio to the reference drifts by more than 2% from the first third of the rounds to the
    last third.
    """
    case_calls, base_calls = _find_fastest_calls_by_round(timing), _find_fastest_calls_by_round(reference)
    rounds = sorted(case_calls.keys() & base_calls.keys())
    if len(rounds) < _MIN_ROUNDS_FOR_DRIFT:
        return False
    log_time_ratios = np.log(np.array([case_calls[round_number] / base_calls[round_number] for round_number in rounds]))
    rounds_per_third = len(log_time_ratios) // 3
    log_ratio_drift = abs(
        float(np.median(log_time_ratios[-rounds_per_third:]) - np.median(log_time_ratios[:rounds_per_third]))
    )
    return abs(stats.correlate_ranks(log_time_ratios)) > MIN_DRIFT_CORRELATION and log_ratio_drift > MIN_DRIFT_LOG_RATIO


def label_shared_device(watch: DeviceWatch | None) -> Iterator[LabelWithReason]:
    """Labels a device on which other programs hold memory. Drivers do not report whether these programs ran."""
    if watch is None:
        return
    words = []
    if watch.others:
        words.append(f"{watch.others} other process{'es' * (watch.others > 1)} on the device")
    if watch.slices:
        words.append(f"{watch.slices} other slice{'s' * (watch.slices > 1)} of the device")
    if words:
        yield LabelWithReason(Label.SHARED, ", ".join(words))


def label_clock_limits(watch: DeviceWatch | None) -> Iterator[LabelWithReason]:
    """Yields labels for a device whose clock was reduced, with the driver's reasons.

    A power cap has a separate label with the clock that it allows, and other harmless reasons have none. The label for
    all remaining reasons is 'throttled', as in 'hw-thermal, sw-thermal 12% of the time'. It is hard if the hardware
    slowed itself down, or if the driver's temperature limit explains only a part of the time.
    """
    if watch is None:
        return
    throttle_reason_bits = watch.throttle or 0
    share_by_reason = (
        {name: min(1.0, seconds / watch.seconds) for name, seconds in watch.held} if watch.seconds > 0 else {}
    )
    throttled_shares = {name: share for name, share in share_by_reason.items() if share > MIN_THROTTLED_SHARE}
    unexplained_heat_share = throttled_shares.get("thermal", 0.0) - share_by_reason.get("sw-thermal", 0.0)
    is_hard_label = (
        bool(throttle_reason_bits & HARDWARE_THROTTLE_BITS or throttled_shares.keys() & _HARDWARE_THROTTLE_REASONS)
        or unexplained_heat_share > MIN_THROTTLED_SHARE
    )
    # 'thermal' is the sum of 'sw-thermal' and 'hw-thermal'.
    if throttled_shares.keys() & {"sw-thermal", "hw-thermal"}:
        throttled_shares.pop("thermal", None)
    words = []
    for name in dict.fromkeys([*list_throttle_reasons(throttle_reason_bits), *throttled_shares]):
        if name in throttled_shares and name not in HARMLESS_THROTTLE_REASONS:
            # Show a small share with a decimal, so that 0.6% does not become 1%.
            decimal_places = 0 if throttled_shares[name] >= 0.01 else 1
            words.append(f"{name} {units.percent(throttled_shares[name], decimal_places)} of the time")
        elif name not in HARMLESS_THROTTLE_REASONS:
            words.append(name)
    if words:
        yield LabelWithReason(Label.THROTTLED, ", ".join(words), is_hard_label)
    if throttle_reason_bits & POWER_CAP_BIT or THROTTLE_REASONS[POWER_CAP_BIT] in throttled_shares:
        is_sm_clock_valid = watch.sm_clock is not None and 0 < watch.sm_clock < math.inf
        yield LabelWithReason(
            Label.POWER_CAPPED, f"SM clock {units.count(watch.sm_clock, 'Hz')}" if is_sm_clock_valid else ""
        )
