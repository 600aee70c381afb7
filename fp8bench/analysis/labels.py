"""Labels of a case: doubts read from its samples, its slots' clocks, and what the device's driver says."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from fp8bench import units
from fp8bench.analysis import stats
from fp8bench.analysis.energy import phase_energies, why_unresolved
from fp8bench.analysis.verdicts import LEAST_FOR_VERDICT, SAME, uneven
from fp8bench.model import DeviceWatch, Finding, Interval, Label, Record, Run, Scalar, SlotSample, Timing
from fp8bench.model.consumed import BITS, CHOSEN, HARDWARE, POWER_CAP, reasons_in
from fp8bench.model.run import BUSY_CORES, PROFILE
from fp8bench.model.stopping import LEAST_ROUNDS

# These may be so grave that they take the verdict away; otherwise they cast doubt as all others do.
CAN_BE_HARD = frozenset(
    {
        Label.AA_FAILED, Label.ABOVE_CEILING, Label.WORK_MISMATCH, Label.FALLBACK, Label.NO_WORK, Label.CONTENDED,
        Label.THROTTLED, Label.LAUNCH_BOUND, Label.UNEVEN, Label.CLOCK_OFFSET, Label.EAGER_QUANTISER,
        Label.OTHER_INPUTS, Label.HANDICAP,
    }
)  # fmt: skip


@dataclass(frozen=True)
class Labelled:
    """A label, its reason here, and whether it is so grave that no verdict can be given."""

    label: Label
    reason: str = ""
    hard: bool = False

    def __post_init__(self) -> None:
        if self.hard and self.label not in CAN_BE_HARD:
            raise ValueError(f"{self.label} takes no verdict away: {', '.join(sorted(CAN_BE_HARD))} can")


# A driver's counter below this share of the time is ignored.
HELD_SHARE = 0.005
_OF_HARDWARE = frozenset({"hw-thermal", "hw-power-brake"})
# The wall clock over the processor time. Above the lower one a slot is disturbed. Above the higher one it got less than
# a fifth of a core, and even its fastest rounds may have been disturbed.
AHEAD = 1.1
FAR_AHEAD = 5.0
# The share of slots above which a case is contended.
SHARE = 0.5
# What a hypervisor took explains a delay if it is this share of it.
_STOLEN_SHARE = 0.5


def disturbed_slots(timing: Timing, ahead: float) -> int:
    """Counts the slots in which the wall clock ran so far ahead of the processor time.

    With one thread the processor time of the process shows a delay. With several, threads that wait for a late one spin
    and count as busy, so the thread that runs the steps is asked: its own time keeps up with the wall clock while it
    has its core. It also falls behind where it sleeps until the others are done, so it counts only if the system says
    that somebody took a core. A rank that waits for another one needs no core; its communication is left out.
    """
    process = [slot for slot in timing.slots if _on_core(slot) > ahead * slot.cpu_seconds]
    thread = [
        slot
        for slot in timing.slots
        if slot.thread_seconds is not None and _on_core(slot) > ahead * slot.thread_seconds
    ]
    return max(len(process), len(thread) if _taken(thread) else 0)


def are_held_up(*timings: Timing) -> bool:
    """Whether too few rounds of a timing were undisturbed to make its best case."""
    return any(
        len(timing.slots) - disturbed_slots(timing, AHEAD) < stats.fastest_of(len(timing.slots))
        for timing in timings
        if timing.slots
    )


# A run before this one is still in the mean load, with its threads and a little more.
_REST = 0.25
# This many busy cores, and this share of all, leave a step another speed; so does the CPU taken in this share of slots.
_BUSY, _BUSY_SHARE, _HELD_UP = 0.5, 0.25, 0.2


def load_of(run: Run) -> str:
    """Returns 'load 3.1 on 2 cores, 1.9 busy at the start'; '' for a quiet machine, or none known."""
    facts = run.environment.facts
    load, cores, busy = (known_number(facts, name) for name in ("load_1min", "cpu_count", BUSY_CORES))
    if not cores:
        return ""
    threads, told = run.request.threads, [f"load {load:g} on {cores:g} cores"]
    told += [f"{busy:g} busy at the start"] if busy else []
    timings = [record.timing for record in run.records if record.timing and record.case.device.startswith("cpu")]
    slots = sum(len(timing.slots) for timing in timings)
    share = sum(disturbed_slots(timing, AHEAD) for timing in timings) / max(1, slots)
    told += [f"they took the CPU in {units.percent(share, 0)} of the slots"] if share > _HELD_UP else []
    is_loaded = load > max(threads, cores - threads) + _REST
    is_busy = busy >= max(_BUSY, _BUSY_SHARE * cores)
    return ", ".join(told) if is_loaded or is_busy or share > _HELD_UP else ""


def known_number(facts: Mapping[str, Scalar | None], name: str) -> float:
    """Returns a positive number among a run's facts, else 0."""
    value = facts.get(name)
    return value if isinstance(value, int | float) and 0 < value < math.inf else 0.0


def _on_core(slot: SlotSample) -> float:
    """Returns how long the process should have had a core; of several ranks the slowest one's counters are used."""
    last = max(slot.ranks, key=lambda rank: sum(rank.step_ns), default=None)
    return slot.wall_seconds - (0.0 if last is None else sum(last.communication_ns) * 1e-9)


def contended(timing: Timing, ahead: float = AHEAD) -> bool:
    return disturbed_slots(timing, ahead) > SHARE * len(timing.slots)


def _taken(slots: Sequence[SlotSample]) -> bool:
    """Whether others took a core: once a slot on average, or for about as long as the thread was late.

    All slots together, because stolen time is counted in steps of 10 ms, which may be longer than a slot.
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


def labels_of(
    record: Record, finding: Finding, reference: Timing | None, aa: Interval | None, others: Sequence[Labelled] = ()
) -> tuple[Labelled, ...]:
    """Returns all labels of a case in the order of Label; `aa` is the A/A interval of its rounds, `others` are
    labels from elsewhere."""
    every = [*_of_samples(record, finding, reference, aa), *others]
    return tuple(sorted(every, key=lambda labelled: list(Label).index(labelled.label)))


def hard_labels(timing: Timing, watch: DeviceWatch | None, aa: Interval | None, device: str) -> tuple[Labelled, ...]:
    """Returns the labels that take the verdict of a case, or of all cases compared with this reference."""
    labels = [
        *_aa_failed(aa, timing.num_rounds),
        *_contended(timing, device),
        *limits_of(watch),
        *_launch_bound(timing, device),
    ]
    return tuple(label for label in labels if label.hard)


def in_process(run: Run) -> tuple[Labelled, ...]:
    """Labels every case of a profile that was not measured in a process of its own."""
    return (Labelled(Label.IN_PROCESS),) if run.origin == PROFILE and not run.request.isolation else ()


def _of_samples(record: Record, finding: Finding, reference: Timing | None, aa: Interval | None) -> Iterator[Labelled]:
    timing = record.timing
    assert timing is not None
    yield from _aa_failed(aa, timing.num_rounds)
    yield from _contended(timing, record.case.device)
    yield from shared(record.watch)
    yield from limits_of(record.watch)
    if why := why_unresolved(record.energy):
        yield Labelled(Label.ENERGY_UNRESOLVED, why)
    phases = phase_energies(record, finding)
    if phases is not None and phases.off_pace:
        yield Labelled(Label.REPLAY_PACE, phases.off_pace)

    if finding.floor is not None and finding.floor > NOISY_FLOOR:
        yield Labelled(Label.NOISY)
    yield from _launch_bound(timing, record.case.device)
    if not record.support.is_emulated:  # else its time is read as no speed
        if timing.num_rounds < LEAST_ROUNDS:
            yield Labelled(Label.FEW_SAMPLES)
        if _bimodal(timing):
            yield Labelled(Label.BIMODAL)
        yield from _uneven(finding, timing, reference)
        if reference is not None and not record.is_reference and record.paired and _drifts(timing, reference):
            yield Labelled(Label.DRIFT)
    if not record.paired:
        yield Labelled(Label.UNPAIRED)
    if timing.varying:
        yield Labelled(Label.VARYING)
    if timing.eager:
        # On a device of its own casts of native formats are part of what is compared; elsewhere they are emulations.
        native = record.support.is_native and record.case.device != "cpu"
        yield Labelled(Label.EAGER_QUANTISER, timing.eager, hard=native)
    yield from _implausible(record, timing)
    if set(finding.below_floor) >= {phase for phase, seconds in finding.phases if seconds > 0}:
        yield Labelled(Label.BELOW_FLOOR)


def _implausible(record: Record, timing: Timing) -> Iterator[Labelled]:
    retries = [slot.memory_retries for slot in timing.slots if slot.memory_retries]
    if retries:  # memory that nobody used had to be given back, for which torch waits until the device is done
        yield Labelled(Label.MEMORY_FULL, f"in {len(retries)} of {len(timing.slots)} slots, {sum(retries)} times")
    if record.memory is not None and record.memory.leak:
        yield Labelled(Label.LEAK, f"{units.size(record.memory.leak)} a step")
    if record.not_finite:
        yield Labelled(Label.NOT_FINITE, f"{units.share(record.not_finite)} of the state")


def _uneven(finding: Finding, timing: Timing, reference: Timing | None) -> Iterator[Labelled]:
    """Labels a case whose mean over all calls differs from its fastest ones; hard unless both say faster, or both
    slower."""
    ratio, typical = finding.ratio, finding.typical
    if ratio is None or typical is None or not uneven(ratio, typical):
        return
    faster = ratio.high < 1 and typical.high < 1
    slower = ratio.low > 1 and typical.low > 1
    told = [f"against the reference, the mean is {units.change(typical.point / ratio.point)} off the fastest calls"]
    if words := pattern(timing):
        told.append(words)
    elif reference is not None and (words := pattern(reference)):
        told.append(f"of the reference {words}")
    yield Labelled(Label.UNEVEN, "; ".join(told), hard=not (faster or slower))


def _aa_failed(aa: Interval | None, rounds: int) -> Iterator[Labelled]:
    """Labels identical code that differs from itself by more than what counts as the same."""
    if aa is not None and rounds >= LEAST_FOR_VERDICT and aa.clearance >= SAME:
        low, high = (units.ratio(bound).removesuffix("x") for bound in (aa.low, aa.high))
        yield Labelled(Label.AA_FAILED, f"A/A {units.ratio(aa.point)} [{low}, {high}]", hard=True)


def _contended(timing: Timing, device: str) -> Iterator[Labelled]:
    """Skips GPUs: a host waits for one anyway, so its clocks show nothing."""
    if not device.startswith("cpu") or not contended(timing):
        return
    hard = contended(timing, FAR_AHEAD)
    slots = f"{disturbed_slots(timing, FAR_AHEAD if hard else AHEAD)} of {len(timing.slots)} slots"
    yield Labelled(Label.CONTENDED, f"less than a fifth of a core in {slots}" if hard else slots, hard)


# The host's time to enqueue a step over the device's time for it behind a full queue. Above the lower one a queue that
# could not be filled far enough runs empty, so that some of the time is the host's. Above the other one, steps in a row
# take the host's time, whatever the device does.
HOST_PARTLY = 0.5
HOST_WHOLLY = 0.95


def host_share(timing: Timing, device: str) -> float:
    """Returns the time that the host took to enqueue a step over the time of the step; 0 on a CPU."""
    if device.startswith("cpu"):
        return 0.0
    host = np.median([slot.host_seconds for slot in timing.slots])
    step = np.median([sum(call) for slot in timing.slots for call in slot.calls_ns]) * 1e-9
    return float(host / step) if step > 0 else math.inf


def _launch_bound(timing: Timing, device: str) -> Iterator[Labelled]:
    """Hard where the host set the time: such a time is only an upper bound of the device's."""
    share = host_share(timing, device)
    if share > HOST_PARTLY:
        took = "as long as" if share > HOST_WHOLLY else f"{units.percent(share, 0)} of the time that"
        yield Labelled(Label.LAUNCH_BOUND, f"the host took {took} the device did", hard=share > HOST_WHOLLY)


def _slot_minima(timing: Timing) -> dict[int, float]:
    return {slot.round: min(sum(call) for call in slot.calls_ns) * 1e-9 for slot in timing.slots}


def _bimodal(timing: Timing) -> bool:
    """Whether there are two clusters of best cases, both well populated and at least 5% apart."""
    minima = np.array(list(_slot_minima(timing).values()))
    explained, below = stats.best_split(np.sort(minima))
    lesser = min(below, len(minima) - below) / len(minima)
    wide = float(np.ptp(minima)) > BIMODAL_GAP * float(np.median(minima))
    return wide and explained > BIMODAL_EXPLAINED and lesser >= BIMODAL_LESSER


def _drifts(timing: Timing, reference: Timing) -> bool:
    """Whether the ratio moves with the rounds, by more than 2% from the first third to the last."""
    case, base = _slot_minima(timing), _slot_minima(reference)
    rounds = sorted(case.keys() & base.keys())
    if len(rounds) < _FEWEST_FOR_DRIFT:
        return False
    ratios = np.log(np.array([case[number] / base[number] for number in rounds]))
    third = len(ratios) // 3
    moved = abs(float(np.median(ratios[-third:]) - np.median(ratios[:third])))
    return abs(stats.rank_correlation(ratios)) > DRIFT_CORRELATION and moved > DRIFT_SHARE


def shared(watch: DeviceWatch | None) -> Iterator[Labelled]:
    """Labels a device on which others have memory; no driver says whether they ran."""
    if watch is None:
        return
    told = []
    if watch.others:
        told.append(f"{watch.others} other process{'es' * (watch.others > 1)} on it")
    if watch.slices:
        told.append(f"{watch.slices} other slice{'s' * (watch.slices > 1)} of it")
    if told:
        yield Labelled(Label.SHARED, ", ".join(told))


def limits_of(watch: DeviceWatch | None) -> Iterator[Labelled]:
    """Labels what held the clocks back, by the bits that were seen and the driver's counters.

    'hw-thermal, sw-thermal 12% of the time' is throttling; it is hard where the hardware slowed itself down, or heat is
    not explained by a software limit. A power cap has the clock that it allows beside it.
    """
    if watch is None:
        return
    mask = watch.throttle or 0
    shares = {name: min(1.0, seconds / watch.seconds) for name, seconds in watch.held} if watch.seconds > 0 else {}
    held = {name: share for name, share in shares.items() if share > HELD_SHARE}
    heat = held.get("thermal", 0.0) - shares.get("sw-thermal", 0.0)
    hard = bool(mask & HARDWARE or held.keys() & _OF_HARDWARE) or heat > HELD_SHARE
    if held.keys() & {"sw-thermal", "hw-thermal"}:  # 'thermal' is what is in them, without saying which
        held.pop("thermal", None)
    names = [name for name in dict.fromkeys([*reasons_in(mask), *held]) if name not in CHOSEN]
    how_long = {name: f" {units.percent(share, 0 if share >= 0.01 else 1)} of the time" for name, share in held.items()}
    if names:
        yield Labelled(Label.THROTTLED, ", ".join(name + how_long.get(name, "") for name in names), hard)
    if mask & POWER_CAP or BITS[POWER_CAP] in held:
        known = watch.sm_clock is not None and 0 < watch.sm_clock < math.inf
        yield Labelled(Label.POWER_CAPPED, f"SM clock {units.count(watch.sm_clock, 'Hz')}" if known else "")


# Two clusters must explain this share of the variance of the logarithms, and their medians differ by this ratio.
EXPLAINED = 0.7
LEAST_RATIO = 1.1
LEAST_CALLS = 3
_MOST_OF = 50
_ABOUT = 0.15
_FAR = 1.5
# The share of calls that may be out of place.
_STRAYS = 0.05


def pattern(timing: Timing) -> str:
    """Describes the slower calls; '' where calls are alike, or do not form two clusters."""
    slots = [np.array([sum(call) for call in slot.calls_ns], dtype=np.float64) for slot in timing.slots]
    taken = sum(slot.preemptions or 0 for slot in timing.slots if slot.waited_seconds)
    every = np.sort(np.concatenate(slots)) if slots else np.empty(0)
    every = every[: len(every) - min(taken, len(every) // 2)]
    if not len(every) or every[0] <= 0:
        return ""
    explained, place = stats.best_split(np.log(every))
    fast, slow = every[:place], every[place:]
    if explained < EXPLAINED or min(len(fast), len(slow)) < LEAST_CALLS:
        return ""
    longer = float(np.median(slow) / np.median(fast))
    if longer < LEAST_RATIO:
        return ""
    # A call far beyond the slow ones is one from which somebody took the core: nobody knows which it was.
    known = [np.where(slot < _FAR * np.median(slow), slot, np.nan) for slot in slots]
    classes: list[Any] = [np.ma.masked_invalid(calls) > (fast[-1] + slow[0]) / 2 for calls in known]
    share = sum(int(cls.filled(False).sum()) for cls in classes) / max(1, sum(cls.count() for cls in classes))
    return f"about {_of(share)} {_place(classes)} {longer:.1f} times as long"


def _of(share: float) -> str:
    """Returns '3 of 4': the simplest fraction near the share."""
    for whole in range(2, _MOST_OF + 1):
        part = round(share * whole)
        if 0 < part < whole and abs(part / whole - share) <= _ABOUT * min(share, 1 - share):
            return f"{part} of {whole}"
    return f"1 of {round(1 / share)}" if share < 0.5 else f"all but 1 of {round(1 / (1 - share))}"


def _place(classes: Sequence[Any]) -> str:
    """Says whether the slower calls are whole rounds or the same calls of each slot; `classes` marks each call."""
    fewest = min(map(len, classes))
    if fewest < 2:
        return "calls take"
    table = np.ma.stack([cls[:fewest] for cls in classes])
    for axis, words in ((1, "rounds take in all their calls"), (0, "calls, always the same ones of a slot, take")):
        shares = table.mean(axis=axis)
        if float(np.minimum(shares, 1 - shares).mean()) < _STRAYS:
            return words
    return "calls take"
