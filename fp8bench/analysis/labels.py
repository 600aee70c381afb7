"""Labels for doubts about a case, from its samples, the clocks of its slots and the driver of its device."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from fp8bench import units
from fp8bench.analysis import stats
from fp8bench.analysis.energy import phase_energies, why_unresolved
from fp8bench.analysis.verdicts import LEAST_FOR_VERDICT, SAME, is_uneven, totals
from fp8bench.model import DeviceWatch, Finding, Interval, Label, Record, Run, Scalar, SlotSample, Timing
from fp8bench.model.consumed import BITS, CHOSEN, HARDWARE, POWER_CAP, reasons_in
from fp8bench.model.run import BUSY_CORES, PROFILE
from fp8bench.model.stopping import LEAST_ROUNDS

# These may be hard, which withdraws the verdict; all other labels only cast doubt.
CAN_BE_HARD = frozenset(
    {
        Label.AA_FAILED, Label.ABOVE_CEILING, Label.WORK_MISMATCH, Label.FALLBACK, Label.NO_WORK, Label.CONTENDED,
        Label.THROTTLED, Label.LAUNCH_BOUND, Label.UNEVEN, Label.CLOCK_OFFSET, Label.EAGER_QUANTISER,
        Label.OTHER_INPUTS, Label.HANDICAP,
    }
)  # fmt: skip


@dataclass(frozen=True)
class Labelled:
    """A label, its reason, and whether it is hard: too grave for any verdict."""

    label: Label
    reason: str = ""
    hard: bool = False

    def __post_init__(self) -> None:
        if self.hard and self.label not in CAN_BE_HARD:
            raise ValueError(f"{self.label} takes no verdict away: {', '.join(sorted(CAN_BE_HARD))} can")


# A driver's counter below this share of the time is ignored.
HELD_SHARE = 0.005
_HARDWARE_REASONS = frozenset({"hw-thermal", "hw-power-brake"})
# The ratio of wall clock to CPU time. Above the lower bound a slot is disturbed. Above the higher one it had less than
# a fifth of a core, and even its fastest rounds may have been disturbed.
AHEAD = 1.1
FAR_AHEAD = 5.0
# The share of slots above which a case is contended.
SHARE = 0.5
# A hypervisor explains a delay if it took this share of it.
_STOLEN_SHARE = 0.5


def disturbed_slots(timing: Timing, ahead: float) -> int:
    """Counts the slots whose wall clock ran ahead of the CPU time by this factor.

    With one thread, the CPU time of the process shows a delay. With several, threads that wait for a late one spin and
    count as busy, so the clock of the thread that runs the steps is used: it keeps up with the wall clock while the
    thread has a core. It also falls behind while the thread sleeps until the others finish, so it counts only if the
    system reports that the core was taken. A rank that waits for another needs no core; communication is left out.
    """
    late_processes, late_threads = 0, []
    for slot in timing.slots:
        seconds = _seconds_on_core(slot)
        if seconds > ahead * slot.cpu_seconds:
            late_processes += 1
        if slot.thread_seconds is not None and seconds > ahead * slot.thread_seconds:
            late_threads.append(slot)
    return max(late_processes, len(late_threads) if _was_preempted(late_threads) else 0)


def are_held_up(*timings: Timing) -> bool:
    """Whether too few rounds of a timing were undisturbed to form its best case."""
    return any(
        len(timing.slots) - disturbed_slots(timing, AHEAD) < stats.fastest_of(len(timing.slots))
        for timing in timings
        if timing.slots
    )


# The mean load still includes the previous run, with its threads and a little more.
_REST = 0.25
# If this many cores, and this share of all, are busy, or a CPU is taken in this share of slots, steps change their
# speed.
_BUSY, _BUSY_SHARE, _HELD_UP = 0.5, 0.25, 0.2


def load_of(run: Run) -> str:
    """Returns 'load 3.1 on 2 cores, 1.9 busy at the start'; '' for a quiet machine, or if nothing is known."""
    facts = run.environment.facts
    load, cores, busy = (positive_fact(facts, name) for name in ("load_1min", "cpu_count", BUSY_CORES))
    if not cores:
        return ""
    threads, words = run.request.threads, [f"load {load:g} on {cores:g} cores"]
    if busy:
        words.append(f"{busy:g} busy at the start")
    timings = [record.timing for record in run.records if record.timing and record.case.device.startswith("cpu")]
    slots = sum(len(timing.slots) for timing in timings)
    share = sum(disturbed_slots(timing, AHEAD) for timing in timings) / max(1, slots)
    if share > _HELD_UP:
        words.append(f"they took the CPU in {units.percent(share, 0)} of the slots")
    is_loaded = load > max(threads, cores - threads) + _REST
    is_busy = busy >= max(_BUSY, _BUSY_SHARE * cores)
    return ", ".join(words) if is_loaded or is_busy or share > _HELD_UP else ""


def positive_fact(facts: Mapping[str, Scalar | None], name: str) -> float:
    """Returns a positive number among a run's facts, else 0."""
    value = facts.get(name)
    return value if isinstance(value, int | float) and 0 < value < math.inf else 0.0


def _seconds_on_core(slot: SlotSample) -> float:
    """Returns how long the process should have had a core; with several ranks, by the slowest one's counters."""
    last = max(slot.ranks, key=lambda rank: sum(rank.step_ns), default=None)
    return slot.wall_seconds - (0.0 if last is None else sum(last.communication_ns) * 1e-9)


def is_contended(timing: Timing, ahead: float = AHEAD) -> bool:
    return disturbed_slots(timing, ahead) > SHARE * len(timing.slots)


def _was_preempted(slots: Sequence[SlotSample]) -> bool:
    """Whether other programs took a core: once per slot on average, or for about as long as the thread was late.

    All slots are pooled, because stolen time is counted in steps of 10 ms, which may be longer than a slot.
    """
    preempted = sum(slot.preemptions or 0 for slot in slots)
    stolen = sum(slot.stolen_seconds or 0.0 for slot in slots)
    late = sum(slot.wall_seconds - (slot.thread_seconds or 0.0) for slot in slots)
    return bool(slots) and (preempted >= len(slots) or stolen >= _STOLEN_SHARE * late)


NOISY_FLOOR = 0.03
DRIFT_CORRELATION = 0.6
DRIFT_SHARE = 0.02
_FEWEST_FOR_DRIFT = 16
BIMODAL_EXPLAINED = 0.9
BIMODAL_GAP = 0.05
BIMODAL_LESSER = 0.2


class _Evidence(NamedTuple):
    """The sources of a case's labels. `reference` is its timing in the same rounds, `aa` their A/A interval."""

    record: Record
    timing: Timing
    finding: Finding
    reference: Timing | None
    aa: Interval | None


def labels_of(
    record: Record, finding: Finding, reference: Timing | None, aa: Interval | None, claims: Sequence[Labelled] = ()
) -> tuple[Labelled, ...]:
    """Returns all labels of a case in the order of Label, `claims` from other checks included.

    `aa` is the A/A interval of its rounds.
    """
    assert record.timing is not None
    evidence = _Evidence(record, record.timing, finding, reference, aa)
    labels: list[Labelled] = []
    for check in CHECKS:
        labels += check(evidence)
    labels += claims
    return tuple(sorted(labels, key=lambda labelled: list(Label).index(labelled.label)))


def hard_labels(timing: Timing, watch: DeviceWatch | None, aa: Interval | None, device: str) -> tuple[Labelled, ...]:
    """Returns the labels that withdraw the verdict of a case, or of all cases compared with this reference."""
    labels = [
        *_label_failed_aa(aa, timing.num_rounds),
        *_label_contention(timing, device),
        *limits_of(watch),
        *_label_host_bound(timing, device),
    ]
    return tuple(label for label in labels if label.hard)


def label_in_process(run: Run) -> tuple[Labelled, ...]:
    """Labels every case of a profile that was not measured in a separate process."""
    return (Labelled(Label.IN_PROCESS),) if run.origin == PROFILE and not run.request.isolation else ()


def _check_rounds(evidence: _Evidence) -> Iterator[Labelled]:
    """Yields doubts about the rounds: noise, other programs on the machine, and the host's overhead."""
    record, timing, finding = evidence.record, evidence.timing, evidence.finding
    yield from _label_failed_aa(evidence.aa, timing.num_rounds)
    yield from _label_contention(timing, record.case.device)
    yield from _label_host_bound(timing, record.case.device)
    if finding.floor is not None and finding.floor > NOISY_FLOOR:
        yield Labelled(Label.NOISY)
    if not record.paired:
        yield Labelled(Label.UNPAIRED)
    if set(finding.below_floor) >= {phase for phase, seconds in finding.phases if seconds > 0}:
        yield Labelled(Label.BELOW_FLOOR)


def _check_shape(evidence: _Evidence) -> Iterator[Labelled]:
    """Yields doubts about how calls and rounds are distributed."""
    record, timing, reference = evidence.record, evidence.timing, evidence.reference
    # An emulation's time never counts as speed.
    if record.support.is_emulated:
        return
    if timing.num_rounds < LEAST_ROUNDS:
        yield Labelled(Label.FEW_SAMPLES)
    if _is_bimodal(timing):
        yield Labelled(Label.BIMODAL)
    yield from _label_uneven_calls(evidence.finding)
    if reference is not None and not record.is_reference and record.paired and _drifts(timing, reference):
        yield Labelled(Label.DRIFT)


def _check_device(evidence: _Evidence) -> Iterator[Labelled]:
    """Yields limits that the driver reports, and doubts about energy."""
    record = evidence.record
    yield from label_shared_device(record.watch)
    yield from limits_of(record.watch)
    if reason := why_unresolved(record.energy):
        yield Labelled(Label.ENERGY_UNRESOLVED, reason)
    phases = phase_energies(record, evidence.finding)
    if phases is not None and phases.off_pace:
        yield Labelled(Label.REPLAY_PACE, phases.off_pace)


def _check_state(evidence: _Evidence) -> Iterator[Labelled]:
    """Yields doubts about the step itself: its work, its memory, its numbers."""
    record, timing = evidence.record, evidence.timing
    if timing.varying:
        yield Labelled(Label.VARYING)
    if timing.eager:
        # On a GPU, casts of native formats are part of the comparison; elsewhere they are emulated.
        native = record.support.is_native and record.case.device != "cpu"
        yield Labelled(Label.EAGER_QUANTISER, timing.eager, hard=native)
    # torch released unused memory, which waits until the device is idle.
    retries = [slot.memory_retries for slot in timing.slots if slot.memory_retries]
    if retries:
        yield Labelled(Label.MEMORY_FULL, f"in {len(retries)} of {len(timing.slots)} slots, {sum(retries)} times")
    if record.memory is not None and record.memory.leak:
        yield Labelled(Label.LEAK, f"{units.size(record.memory.leak)} a step")
    if record.not_finite:
        yield Labelled(Label.NOT_FINITE, f"{units.share(record.not_finite)} of the state")


CHECKS = (_check_rounds, _check_shape, _check_device, _check_state)


def _label_uneven_calls(finding: Finding) -> Iterator[Labelled]:
    """Labels a case whose mean over all calls differs from its fastest ones; hard unless both agree on faster or
    slower."""
    ratio, typical = finding.ratio, finding.typical
    if ratio is None or typical is None or not is_uneven(ratio, typical):
        return
    faster = ratio.high < 1 and typical.high < 1
    slower = ratio.low > 1 and typical.low > 1
    reason = f"against the reference, the mean is {units.change(typical.point / ratio.point)} off the fastest calls"
    yield Labelled(Label.UNEVEN, reason, hard=not (faster or slower))


def _label_failed_aa(aa: Interval | None, rounds: int) -> Iterator[Labelled]:
    """Labels identical code whose times differ by more than counts as the same."""
    if aa is not None and rounds >= LEAST_FOR_VERDICT and aa.clearance >= SAME:
        low, high = (units.ratio(bound).removesuffix("x") for bound in (aa.low, aa.high))
        yield Labelled(Label.AA_FAILED, f"A/A {units.ratio(aa.point)} [{low}, {high}]", hard=True)


def _label_contention(timing: Timing, device: str) -> Iterator[Labelled]:
    """Skips GPUs: a host waits for one anyway, so its clocks show nothing."""
    if not device.startswith("cpu") or not is_contended(timing):
        return
    hard = is_contended(timing, FAR_AHEAD)
    slots = f"{disturbed_slots(timing, FAR_AHEAD if hard else AHEAD)} of {len(timing.slots)} slots"
    yield Labelled(Label.CONTENDED, f"less than a fifth of a core in {slots}" if hard else slots, hard)


# The host's time to enqueue a step over the device's time for it behind a full queue. Above the lower bound a short
# queue runs empty, so some of the time is the host's. Above the higher one, consecutive steps take the host's time,
# regardless of the device.
HOST_PARTLY = 0.5
HOST_WHOLLY = 0.95


def host_share(timing: Timing, device: str) -> float:
    """Returns the time that the host took to enqueue a step over the time of the step; 0 on a CPU."""
    if device.startswith("cpu"):
        return 0.0
    host = np.median([slot.host_seconds for slot in timing.slots])
    step = np.median(totals(timing))
    return float(host / step) if step > 0 else math.inf


def _label_host_bound(timing: Timing, device: str) -> Iterator[Labelled]:
    """Labels a step whose time the host sets or may set; hard if it does, because the time is then only an upper bound
    of the device's."""
    share = host_share(timing, device)
    if share > HOST_PARTLY:
        took = "as long as" if share > HOST_WHOLLY else f"{units.percent(share, 0)} of the time that"
        yield Labelled(Label.LAUNCH_BOUND, f"the host took {took} the device did", hard=share > HOST_WHOLLY)


def _slot_minima(timing: Timing) -> dict[int, float]:
    return {slot.round: min(sum(call) for call in slot.calls_ns) * 1e-9 for slot in timing.slots}


def _is_bimodal(timing: Timing) -> bool:
    """Whether there are two clusters of best cases, both well populated and at least 5% apart."""
    minima = np.array(list(_slot_minima(timing).values()))
    explained, below = stats.best_split(np.sort(minima))
    lesser = min(below, len(minima) - below) / len(minima)
    wide = float(np.ptp(minima)) > BIMODAL_GAP * float(np.median(minima))
    return wide and explained > BIMODAL_EXPLAINED and lesser >= BIMODAL_LESSER


def _drifts(timing: Timing, reference: Timing) -> bool:
    """Whether the ratio drifts: by more than 2% from the first third of the rounds to the last."""
    case, base = _slot_minima(timing), _slot_minima(reference)
    rounds = sorted(case.keys() & base.keys())
    if len(rounds) < _FEWEST_FOR_DRIFT:
        return False
    ratios = np.log(np.array([case[number] / base[number] for number in rounds]))
    third = len(ratios) // 3
    moved = abs(float(np.median(ratios[-third:]) - np.median(ratios[:third])))
    return abs(stats.rank_correlation(ratios)) > DRIFT_CORRELATION and moved > DRIFT_SHARE


def label_shared_device(watch: DeviceWatch | None) -> Iterator[Labelled]:
    """Labels a device on which other programs hold memory; no driver reports whether they ran."""
    if watch is None:
        return
    words = []
    if watch.others:
        words.append(f"{watch.others} other process{'es' * (watch.others > 1)} on it")
    if watch.slices:
        words.append(f"{watch.slices} other slice{'s' * (watch.slices > 1)} of it")
    if words:
        yield Labelled(Label.SHARED, ", ".join(words))


def limits_of(watch: DeviceWatch | None) -> Iterator[Labelled]:
    """Labels what held the clocks back, from the recorded bits and the driver's counters.

    'hw-thermal, sw-thermal 12% of the time' is throttling; it is hard if the hardware slowed itself down, or if no
    software limit explains the heat. A power cap has a separate label, with the clock that it allows.
    """
    if watch is None:
        return
    mask = watch.throttle or 0
    shares = {name: min(1.0, seconds / watch.seconds) for name, seconds in watch.held} if watch.seconds > 0 else {}
    held = {name: share for name, share in shares.items() if share > HELD_SHARE}
    heat = held.get("thermal", 0.0) - shares.get("sw-thermal", 0.0)
    hard = bool(mask & HARDWARE or held.keys() & _HARDWARE_REASONS) or heat > HELD_SHARE
    # 'thermal' is the sum of the other two.
    if held.keys() & {"sw-thermal", "hw-thermal"}:
        held.pop("thermal", None)
    words = []
    for name in dict.fromkeys([*reasons_in(mask), *held]):
        if name in held and name not in CHOSEN:
            digits = 0 if held[name] >= 0.01 else 1
            words.append(f"{name} {units.percent(held[name], digits)} of the time")
        elif name not in CHOSEN:
            words.append(name)
    if words:
        yield Labelled(Label.THROTTLED, ", ".join(words), hard)
    if mask & POWER_CAP or BITS[POWER_CAP] in held:
        has_clock = watch.sm_clock is not None and 0 < watch.sm_clock < math.inf
        yield Labelled(Label.POWER_CAPPED, f"SM clock {units.count(watch.sm_clock, 'Hz')}" if has_clock else "")
