"""Labels for a handicapped reference: slower than necessary, or with inputs unlike its case's.

Any precision looks fast next to a reference that multiplies far below the device's peak, moves or copies more numbers,
multiplies wider or smaller pieces, computes subnormal numbers, sleeps, or spends its time in other code.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from fp8bench import units
from fp8bench.analysis import verdicts
from fp8bench.analysis.labels import Labelled, is_contended
from fp8bench.analysis.roofline import bounds_of, kind_of_path
from fp8bench.analysis.tapes import bits_of, product_work
from fp8bench.errors import UsageError
from fp8bench.model import GivenTensors, Label, Level, Phase, Record, SlotSample, Tape, Timing
from fp8bench.model.run import BENCH
from fp8bench.model.words import UNTOUCHED
from fp8bench.registry import precisions

# Rounding to four bits moves a root mean square by 2% at most.
_DIFFERENT_SIZE = 0.1
_SUBNORMAL = 0.01
# If sums differ by more than this many root sums of squares, the numbers are different (true for six of seven cases).
# Rounding to four bits moves sums by 0.1, and shifting all values moves them by the second share.
_DIFFERENT_SUM, _SHIFT = 0.25, 0.02
# A product is far below its ceiling if it reaches less than this share of it and takes this many seconds; shorter
# products count only if the case's come this many times nearer. fp8bench's fp32 products reach at least 0.65 on an idle
# core, convolutions 0.2.
_LOW_SHARE, _LARGE_SECONDS, _LONG_SECONDS, _NEARER = 1 / 3, 1e-3, 1e-4, 2.0
_MOVES_MORE = 2.0
_COPIES = frozenset({"clone", "copy_", "_to_copy"})
_MORE_COPIES = 0.1
_MORE_WIDE = 0.05
_MORE_SLEEP = _MORE_THREADS = 0.1
# The same threads take up to this many times as long on a busy machine.
_MANY_TIMES = 3.0
# A reference is suspect if it yields its core this many times more often per step.
_MORE_WAITS = 0.5
# A reference is suspect if it spends this larger share of its time outside torch's operators.
_MORE_OUTSIDE, _OUTSIDE_SECONDS = 0.15, 50e-6
# A reference is suspect if it spends this larger share in an operator that it calls this many times as often as the
# case, relative to the numbers moved.
_MORE_IN_OPERATOR, _CALLED_MORE = 0.1, 1.5
_MORE_PIECES = 3


def handicaps_of(record: Record, reference: Record, threads: int = 1) -> Iterator[Labelled]:
    """Yields the labels that a case gets because of its reference.

    Inputs of different size or subnormality, and a reference that sleeps, are hard. Callables are exempt from further
    checks.
    """
    yield from _label_different_inputs(record, reference)
    if Level.EMULATED in (record.support.level, reference.support.level) or not record.paired:
        return
    if record.case.workload == BENCH:
        return
    # A process has its core to itself only on a CPU, and without ranks that wait for each other.
    has_core = record.case.device == "cpu" and record.case.ranks < 2
    sleeps = list(_compare_sleep(record, reference)) if has_core else []
    reasons = [*_compare_ceilings(record, reference), *sleeps, *_compare_late_steps(record, reference)]
    if has_core and threads == 1:
        reasons += _compare_threads(record, reference)
        if not sleeps:
            reasons += _compare_waits(record, reference)
    if record.tape is not None and reference.tape is not None:
        reasons += _compare_moves(record.tape, reference.tape)
        reasons += _compare_widths(record, record.tape, reference, reference.tape)
        reasons += _compare_calls(record.tape, reference.tape)
        reasons += _compare_layouts(record, reference, reference.tape)
    if reasons:
        yield Labelled(Label.HANDICAP, f"{reference.case.mode} {'; '.join(reasons)}", hard=bool(sleeps))


def _if_more(reference_share: float, share: float, least: float, words: str) -> Iterator[str]:
    """Yields the words, filled in with both shares, if the reference's share is larger by more than `least`."""
    if reference_share - share > least:
        yield words.format(units.percent(reference_share, 0), units.percent(share, 0))


def _label_different_inputs(record: Record, reference: Record) -> Iterator[Labelled]:
    """Compares tensors by shape if both have equally many; formats specific to a precision are left out."""
    if record.products is None or reference.products is None:
        return
    tensors = {given.shape: given for given in record.products.given}
    mode, scale = reference.case.mode, _loss_scale(record) / _loss_scale(reference)
    distances = []
    reasons = []
    for base in reference.products.given:
        given = tensors.get(base.shape)
        if given is not None and given.tensors == base.tensors:
            given = _without_loss_scale(given, base, scale)
            distances.append(_squared_distance(given, base))
            reasons.append(_describe_different_size(given, base, mode))
    if reason := next(filter(None, reasons), ""):
        yield Labelled(Label.OTHER_INPUTS, reason, hard=True)
    elif distances and math.sqrt(sum(distances) / len(distances)) > _DIFFERENT_SUM:
        yield Labelled(Label.OTHER_INPUTS, f"of {mode}'s size, and other numbers")


def _loss_scale(record: Record) -> float:
    """Returns the loss scale of a case's precision; 1 if it is not registered here."""
    try:
        return precisions.get(record.case.precision).loss_scale or 1.0
    except UsageError:
        return 1.0


def _without_loss_scale(given: GivenTensors, base: GivenTensors, scale: float) -> GivenTensors:
    """Returns the tensors unchanged, or without fp16's loss scale of gradients: whichever is nearer to the base."""
    unscaled = replace(given, total=given.total / scale, squares=given.squares / scale**2)
    return min(given, unscaled, key=lambda tensors: abs(tensors.rms - base.rms))


def _describe_different_size(given: GivenTensors, base: GivenTensors, mode: str) -> str:
    """Describes inputs that differ in magnitude, or in their share of subnormals; else ''."""
    shape = _join_shape(given)
    share, base_share = (tensors.subnormals / tensors.elements for tensors in (given, base))
    if abs(base_share - share) > _SUBNORMAL:
        subnormal = f"{units.percent(base_share, 0)} of {mode}'s numbers in {shape} are subnormal"
        return f"{subnormal}, {units.percent(share, 0)} of its own"
    if abs(given.rms - base.rms) > _DIFFERENT_SIZE * max(given.rms, base.rms):
        return f"the root mean square of {mode}'s {shape} is {base.rms:.3g}, that of its own {given.rms:.3g}"
    return ""


def _join_shape(given: GivenTensors) -> str:
    return " x ".join(map(str, given.shape))


def _squared_distance(given: GivenTensors, base: GivenTensors) -> float:
    """Returns the squared difference of their sums over the sum of squares: about 2 for unrelated numbers."""
    distance = max(0.0, abs(given.total - base.total) - _SHIFT * abs(base.total))
    return distance**2 / base.squares if base.squares else 0.0


def _compare_sleep(record: Record, reference: Record) -> Iterator[str]:
    """Compares the time in which a process neither ran nor waited for a core."""
    share, base = _share_asleep(record.timing), _share_asleep(reference.timing)
    if share is not None and base is not None:
        yield from _if_more(base, share, _MORE_SLEEP, "sleeps {} of its time, this case {}")


def _share_asleep(timing: Timing | None) -> float | None:
    """Returns the share of the median slot spent asleep; None if waiting for a core was not recorded."""
    shares = []
    for slot in _slots_of(timing):
        if slot.waited_seconds is not None and slot.wall_seconds > 0:
            awake = slot.cpu_seconds + slot.waited_seconds + (slot.stolen_seconds or 0.0)
            shares.append(1 - awake / slot.wall_seconds)
    return max(0.0, float(np.median(shares))) if shares else None


def _slots_of(timing: Timing | None) -> Sequence[SlotSample]:
    return timing.slots if timing is not None else ()


def _compare_threads(record: Record, reference: Record) -> Iterator[str]:
    """Compares the work of further threads of the process, where torch has only one."""
    work, base_work = _further_threads(record.timing), _further_threads(reference.timing)
    if work is None or base_work is None:
        return
    if _is_far_above(work, base_work) or _is_far_above(base_work, work):
        base_words, words = units.seconds(max(base_work.seconds, 0.0)), units.seconds(max(work.seconds, 0.0))
        yield f"has other threads at work for {base_words} a step, this case for {words}"


class _ThreadWork(NamedTuple):
    """Seconds of further threads per step, of the median slot and of the slot with most; and of the median step."""

    seconds: float
    most: float
    step: float


def _is_far_above(work: _ThreadWork, base: _ThreadWork) -> bool:
    # On a busy machine the work of an honest loader may fall between most slots of one arm, but not between all.
    is_large = work.seconds - base.seconds > _MORE_THREADS * work.step
    return is_large and work.seconds > _MANY_TIMES * base.most


def _compare_waits(record: Record, reference: Record) -> Iterator[str]:
    """Compares the least time that slots were off their core.

    Other programs may have taken the core; the minimum leaves them out.
    """
    late, base = record.late, reference.late
    if late is not None and base is not None and base.waits - late.waits > _MORE_WAITS:
        share, base_share = _least_share_off_core(record.timing), _least_share_off_core(reference.timing)
        yield from _if_more(base_share, share, _MORE_SLEEP, "waits for {} of its time or more, this case for {}")


def _least_share_off_core(timing: Timing | None) -> float:
    shares = [1 - slot.cpu_seconds / slot.wall_seconds for slot in _slots_of(timing) if slot.wall_seconds]
    return max(0.0, min(shares, default=0.0))


def _further_threads(timing: Timing | None) -> _ThreadWork | None:
    """Returns None if the seconds of threads were not recorded."""
    slots = [slot for slot in _slots_of(timing) if slot.thread_seconds is not None]
    if not slots:
        return None
    work = [(slot.cpu_seconds - (slot.thread_seconds or 0.0)) / len(slot.calls_ns) for slot in slots]
    steps = [slot.wall_seconds / len(slot.calls_ns) for slot in slots]
    return _ThreadWork(float(np.median(work)), max(work), float(np.median(steps)))


def _least_thread_seconds(timing: Timing | None) -> float:
    """Returns the lowest seconds per step of any slot, by the thread's clock; 0 if they were not recorded."""
    slots = [slot for slot in _slots_of(timing) if slot.thread_seconds]
    return min(((slot.thread_seconds or 0.0) / len(slot.calls_ns) for slot in slots), default=0.0)


def _compare_late_steps(record: Record, reference: Record) -> Iterator[str]:
    """Compares what untimed steps did while their operators were recorded."""
    late, base = record.late, reference.late
    if late is None or base is None:
        return
    # 1. Subnormal results, and switches of arithmetic.
    if max(late.subnormal, base.subnormal) > _SUBNORMAL:
        base_share, share = units.percent(base.subnormal, 0), units.percent(late.subnormal, 0)
        yield f"has {base_share} subnormal numbers in its results, this case {share}: a processor is slow at them"
    if late.switches != base.switches:
        base_words, words = (", ".join(steps.switches) or "no switch" for steps in (base, late))
        yield f"sets {base_words} within its steps, this case {words}"
    # 2. Time outside of torch's operators.
    if not late.in_operators or not base.in_operators:
        return
    step, base_step = _least_thread_seconds(record.timing), _least_thread_seconds(reference.timing)
    outside, base_outside = max(0.0, step - late.in_operators), base_step - base.in_operators
    if step > 0 and base_step > 0 and base_outside - outside > _OUTSIDE_SECONDS:
        words = "spends {} of its time outside of torch's operators, this case {}"
        yield from _if_more(base_outside / base_step, outside / step, _MORE_OUTSIDE, words)
    # 3. Time in operators that the case calls less.
    if record.tape is None or reference.tape is None:
        return
    products = {operator.operator for operator in reference.tape.operators if operator.flops}
    seconds = dict(late.seconds)
    for name, base_seconds in base.seconds:
        calls, base_calls = _weigh_calls(record.tape, name), _weigh_calls(reference.tape, name)
        is_slow = base_seconds - seconds.get(name, 0.0) > _MORE_IN_OPERATOR * base.in_operators
        if is_slow and base_calls > _CALLED_MORE * calls and name not in products | _COPIES:
            share = units.percent(base_seconds / base.in_operators, 0)
            yield f"spends {share} of its operators' time in {name}, which this case calls less"


def _weigh_calls(tape: Tape, name: str) -> float:
    """Returns how often a step calls an operator, plus the numbers that it moves."""
    return _moved_by(tape, {name}) + sum(count.calls for count in tape.operators if count.operator == name)


def _compare_calls(tape: Tape, base: Tape) -> Iterator[str]:
    """Compares the calls that products take; a kernel that batches products is to the case's credit."""
    calls, base_calls = _count_product_calls(tape), _count_product_calls(base)
    grouped = any("grouped" in count.operator for count in tape.operators)
    if calls and base_calls >= _MORE_PIECES * calls and not (grouped or tape.fused or base.fused):
        yield f"multiplies in {base_calls} calls, this case in {calls}"


def _count_product_calls(tape: Tape) -> int:
    return sum(count.calls for count in tape.operators if count.flops)


def _compare_layouts(record: Record, reference: Record, base_tape: Tape) -> Iterator[str]:
    """Describes a reference whose tensors are scattered in memory, or that holds more tensors of a shape than its step
    reads and than the case holds: each step then reads different ones, and none is in a cache."""
    if record.products is None or reference.products is None:
        return
    reads = _count_reads_by_size(base_tape)
    tensors = {given.shape: given for given in record.products.given}
    for base in reference.products.given:
        given = tensors.get(base.shape)
        if given is None:
            continue
        words = f"{base.tensors} tensors of {_join_shape(base)}"
        read = reads.get(math.prod(base.shape), 0)
        if base.tensors > max(2 * read, given.tensors):
            yield f"holds {words}, of which a step reads {read}; this case holds {given.tensors}"
        elif base.scattered > given.scattered:
            yield f"has numbers of {words} scattered in memory, this case side by side"


def _count_reads_by_size(tape: Tape) -> dict[int, int]:
    """Returns how many tensors of each number of elements a step reads, by inputs like 'fp32[512,512]'."""
    reads: dict[int, int] = {}
    for operator in tape.operators:
        for words in operator.inputs:
            shape = words.partition("[")[2].rstrip("]")
            size = math.prod(map(int, filter(None, shape.split(","))))
            reads[size] = reads.get(size, 0) + operator.calls
    return reads


def _compare_ceilings(record: Record, reference: Record) -> Iterator[str]:
    """Describes a reference whose products are far below their ceiling: long ones, or any if the case comes much
    nearer. Attention has a separate phase."""
    timing = reference.timing
    if timing is None or timing.num_rounds < verdicts.LEAST_FOR_VERDICT or is_contended(timing):
        return
    share, _ = _share_of_ceiling(record)
    base_share, seconds = _share_of_ceiling(reference)
    long_enough = _LONG_SECONDS if share >= _NEARER * base_share else _LARGE_SECONDS
    if base_share < _LOW_SHARE and seconds >= long_enough:
        base_words, words = units.percent(base_share, 0), units.percent(share, 0)
        yield f"multiplies at {base_words} of what this machine does in its dtype, this case at {words}"


def _share_of_ceiling(record: Record) -> tuple[float, float]:
    """Returns the least time of a step's products over that of their phase, and the least time per product.

    Both are 0 if unknown.
    """
    tape, ceiling, timing = record.tape, record.ceiling, record.timing
    if tape is None or tape.fused or ceiling is None or timing is None:
        return 0.0, 0.0
    products = [operator for operator in tape.operators if operator.flops and operator.phase == Phase.GEMM]
    seconds = dict(verdicts.best_phases(timing)).get(Phase.GEMM, 0.0)
    # Kernels of convolutions differ by dtype.
    if not products or not seconds or any("convolution" in product.operator for product in products):
        return 0.0, 0.0
    bounds, memory = bounds_of(ceiling), ceiling.bytes or math.inf
    least = 0.0
    for product in products:
        rate = bounds.products.get(kind_of_path(product.path)) or ceiling.flops or math.inf
        least += product.calls * max((product.flops or 0) / rate, product.bytes / memory)
    return least / seconds, least / sum(product.calls for product in products)


def _compare_moves(tape: Tape, base_tape: Tape) -> Iterator[str]:
    """Compares counts of moved numbers, regardless of width; the casts of a case add to its count."""
    if tape.fused or tape.unwritten or base_tape.fused or base_tape.unwritten:
        return
    by_dtype, base_by_dtype = _moved_by_dtype(tape), _moved_by_dtype(base_tape)
    moved, base_moved = sum(by_dtype.values()), sum(base_by_dtype.values())
    share, base_share = by_dtype.get("fp64", 0.0) / (moved or 1), base_by_dtype.get("fp64", 0.0) / (base_moved or 1)
    yield from _if_more(base_share, share, _MORE_WIDE, "moves {} of its numbers in fp64, this case {}")
    # Copies read and write numbers, casts included.
    copied = _moved_by(base_tape, _COPIES) - _moved_by(tape, _COPIES)
    if moved and base_moved >= _MOVES_MORE * moved:
        yield f"moves {base_moved / moved:.1f} times the numbers that this case moves"
    elif copied > _MORE_COPIES * base_moved:
        yield f"moves {units.percent(copied / base_moved, 0)} of its numbers in copies that this case does not make"


def _moved_by_dtype(tape: Tape) -> dict[str, float]:
    """Returns how many numbers a step moves, by their dtype."""
    numbers: dict[str, float] = {}
    for phase in tape.phases:
        for dtype, size in phase.by_dtype:
            numbers[dtype] = numbers.get(dtype, 0.0) + 8 * size / (bits_of(dtype) or 8)
    return numbers


def _moved_by(tape: Tape, names: Collection[str]) -> float:
    """Returns how many numbers operators of these names read and write."""
    numbers = 0.0
    for operator in tape.operators:
        if operator.operator in names and operator.outputs:
            widths = [bits_of(words.partition("[")[0]) or 8 for words in (*operator.inputs, *operator.outputs)]
            numbers += 8 * operator.calls * operator.bytes * len(widths) / sum(widths)
    return numbers


def _compare_widths(record: Record, tape: Tape, reference: Record, base_tape: Tape) -> Iterator[str]:
    """Describes a reference with more products in casts, or in dtypes wider than its narrowest, than the case has.

    Models that were not converted are exempt.
    """
    narrowest = 64
    if reference.case.precision != UNTOUCHED:
        main_paths = [path for path, flops in base_tape.by_path.items() if flops > _MORE_WIDE * base_tape.flops]
        narrowest = min(map(bits_of, main_paths), default=64)
    rotated, base_rotated = (
        product_work(counted_tape).rotations / max(counted_tape.flops, 1) for counted_tape in (tape, base_tape)
    )
    words = "multiplies {} of its FLOPs in its casts, this case {}"
    yield from _if_more(base_rotated, rotated, _MORE_WIDE, words)
    words = f"multiplies {{}} of its FLOPs in more than {narrowest} bits, this case {{}}"
    yield from _if_more(_share_wider(base_tape, narrowest), _share_wider(tape, narrowest), _MORE_WIDE, words)


def _share_wider(tape: Tape, bits: int) -> float:
    return sum(flops for path, flops in tape.by_path.items() if bits_of(path) > bits) / max(tape.flops, 1)
