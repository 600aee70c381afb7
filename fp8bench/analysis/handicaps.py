"""Labels for a reference that is slower than it need be, or that is given other numbers than its case.

Low precision is fast beside a reference that multiplies far below what the device does, moves or copies more numbers,
multiplies wider ones or in pieces, computes subnormal ones, sleeps, or spends its time in other code.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator
from dataclasses import replace

import numpy as np

from fp8bench import units
from fp8bench.analysis import verdicts
from fp8bench.analysis.labels import Labelled, contended
from fp8bench.analysis.roofline import bounds_of, kind_of_path
from fp8bench.analysis.tapes import bits_of, product_work
from fp8bench.errors import UsageError
from fp8bench.model import GivenTensors, Label, Level, Phase, Record, Tape, Timing
from fp8bench.model.run import BENCH
from fp8bench.model.words import UNTOUCHED
from fp8bench.registry import precisions

# Rounding to four bits moves a root mean square by 2% at most.
_OTHER_SIZE = 0.1
_SUBNORMAL = 0.01
# Sums of other numbers differ by more than this many root sums of squares, in six of seven cases; rounding to four bits
# moves them by 0.1, and shifts of all values alike by this share of the sum.
_OTHER_SUM, _ALIKE = 0.25, 0.02
# A product is far below its ceiling at less than this share of it, if it takes so many seconds; a shorter one only if
# the case's products come so many times nearer to theirs. fp8bench's own in fp32 are at 0.65 or more on a core of their
# own, convolutions at 0.2.
_LOW_SHARE, _LARGE_SECONDS, _LONG_SECONDS, _NEARER = 1 / 3, 1e-3, 1e-4, 2.0
_MOVES_MORE = 2.0
_COPIES = frozenset({"clone", "copy_", "_to_copy"})
_MORE_COPIES = 0.1
_MORE_WIDE = 0.05
_MORE_SLEEP = _MORE_THREADS = 0.1
# The same threads take up to so many times as long on a busy machine.
_MANY_TIMES = 2.0
# Times more a step that a reference leaves its core by itself.
_MORE_WAITS = 0.5
# More of a reference's time in code that is no operator of torch's; and in operators that the case calls less, by the
# numbers that they move.
_MORE_OUTSIDE, _OUTSIDE_SECONDS = 0.15, 50e-6
_MORE_IN_OPERATOR, _CALLED_MORE = 0.1, 1.5
_MORE_PIECES = 3


def handicaps_of(record: Record, reference: Record | None, threads: int = 1) -> Iterator[Labelled]:
    """Yields labels of a case for its reference. Hard: other inputs, by size or subnormals, and a reference that
    sleeps. A callable is compared with another one as that is."""
    if reference is None or reference is record:
        return
    yield from _other_inputs(record, reference)
    if Level.EMULATED in (record.support.level, reference.support.level) or not record.paired:
        return
    if record.case.workload == BENCH:
        return
    alone = record.case.device == "cpu" and record.case.ranks < 2
    asleep = [*_sleeps(record, reference)] if alone else []
    told = [*_far_below(record, reference), *asleep, *_late_handicaps(record, reference)]
    if alone and threads == 1:
        told += [*_other_threads(record, reference), *([] if asleep else _waits(record, reference))]
    if record.tape is not None and reference.tape is not None:
        told += [*_moves_more(record.tape, reference.tape), *_wider(record, reference)]
        told += [*_in_pieces(record.tape, reference.tape), *_held_otherwise(record, reference)]
    if told:
        yield Labelled(Label.HANDICAP, f"{reference.case.mode} {'; '.join(told)}", hard=bool(asleep))


def _more(theirs: float, own: float, least: float, words: str) -> Iterator[str]:
    """Yields the words, with both shares in their places, if a reference's share is larger by more than the least."""
    if theirs - own > least:
        yield words.format(units.percent(theirs, 0), units.percent(own, 0))


def _other_inputs(record: Record, reference: Record) -> Iterator[Labelled]:
    """Compares tensors of shapes of which both are given as many; a precision's own formats are not among them."""
    own = {given.shape: given for given in record.products.given} if record.products else {}
    theirs, mode = reference.products.given if reference.products else (), reference.case.mode
    times = _loss_scale(record) / _loss_scale(reference)
    pairs = [
        (_scaled(mine, given, times), given)
        for given in theirs
        if (mine := own.get(given.shape)) and mine.tensors == given.tensors
    ]
    for mine, given in pairs:
        if why := _unlike(mine, given, mode):
            yield Labelled(Label.OTHER_INPUTS, why, hard=True)
            return
    if pairs and math.sqrt(sum(_apart(*pair) for pair in pairs) / len(pairs)) > _OTHER_SUM:
        yield Labelled(Label.OTHER_INPUTS, f"of {mode}'s size, and other numbers")


def _loss_scale(record: Record) -> float:
    """Returns 1 for a precision that is not known here."""
    try:
        return precisions.get(record.case.precision).loss_scale or 1.0
    except UsageError:
        return 1.0


def _scaled(mine: GivenTensors, theirs: GivenTensors, times: float) -> GivenTensors:
    """Returns it as it came, or without fp16's loss scale of gradients: whichever is nearer to the reference's size."""
    other = replace(mine, total=mine.total / times, squares=mine.squares / times**2)
    return min(mine, other, key=lambda given: abs(given.rms - theirs.rms))


def _unlike(mine: GivenTensors, theirs: GivenTensors, mode: str) -> str:
    shape = " x ".join(map(str, mine.shape))
    own, share = (given.subnormals / given.elements for given in (mine, theirs))
    if abs(share - own) > _SUBNORMAL:
        subnormal = f"{units.percent(share, 0)} of {mode}'s numbers in {shape} are subnormal"
        return f"{subnormal}, {units.percent(own, 0)} of its own"
    if abs(mine.rms - theirs.rms) > _OTHER_SIZE * max(mine.rms, theirs.rms):
        return f"the root mean square of {mode}'s {shape} is {theirs.rms:.3g}, that of its own {mine.rms:.3g}"
    return ""


def _apart(mine: GivenTensors, theirs: GivenTensors) -> float:
    """Returns the square of how far their sums differ, over the sum of squares: about 2 for other numbers."""
    far = max(0.0, abs(mine.total - theirs.total) - _ALIKE * abs(theirs.total))
    return far**2 / theirs.squares if theirs.squares else 0.0


def _sleeps(record: Record, reference: Record) -> Iterator[str]:
    """Compares the time in which a process neither ran nor waited for a core."""
    own, theirs = _asleep(record.timing), _asleep(reference.timing)
    if own is not None and theirs is not None:
        yield from _more(theirs, own, _MORE_SLEEP, "sleeps {} of its time, this case {}")


def _asleep(timing: Timing | None) -> float | None:
    """Returns that share of the median slot; None where nobody knows who waited for a core."""
    shares = [
        1 - (slot.cpu_seconds + slot.waited_seconds + (slot.stolen_seconds or 0.0)) / slot.wall_seconds
        for slot in (timing.slots if timing is not None else ())
        if slot.waited_seconds is not None and slot.wall_seconds > 0
    ]
    return max(0.0, float(np.median(shares))) if shares else None


def _other_threads(record: Record, reference: Record) -> Iterator[str]:
    """Compares what other threads of the process did in a step, where torch has but one."""
    own, theirs = _beside(record.timing), _beside(reference.timing)
    if own is None or theirs is None:
        return
    (mine, step), (other, reference_step) = own, theirs
    differs = mine - other > _MORE_THREADS * step or other - mine > _MORE_THREADS * reference_step
    if differs and max(mine, other) > _MANY_TIMES * min(mine, other):
        busy, this = units.seconds(max(other, 0.0)), units.seconds(max(mine, 0.0))
        yield f"has other threads at work for {busy} a step, this case for {this}"


def _waits(record: Record, reference: Record) -> Iterator[str]:
    """Compares the least time that slots were off their core. Others may have had it, but then no step left it by
    itself."""
    own, theirs = record.late, reference.late
    if own is not None and theirs is not None and theirs.waits - own.waits > _MORE_WAITS:
        shares = _off_core(reference.timing), _off_core(record.timing)
        yield from _more(shares[0], shares[1], _MORE_SLEEP, "waits for {} of its time or more, this case for {}")


def _off_core(timing: Timing | None) -> float:
    slots = timing.slots if timing is not None else ()
    return max(0.0, min((1 - slot.cpu_seconds / slot.wall_seconds for slot in slots if slot.wall_seconds), default=0.0))


def _beside(timing: Timing | None) -> tuple[float, float] | None:
    """Returns the median slot's seconds of other threads in a step, and of the step; None where nobody knows."""
    slots = [slot for slot in timing.slots if slot.thread_seconds is not None] if timing is not None else []
    if not slots:
        return None
    others = [(slot.cpu_seconds - (slot.thread_seconds or 0.0)) / len(slot.calls_ns) for slot in slots]
    return float(np.median(others)), float(np.median([slot.wall_seconds / len(slot.calls_ns) for slot in slots]))


def _of_thread(timing: Timing | None) -> float:
    """Returns the least of a slot's seconds a step, by the thread's own clock; 0 where nobody knows."""
    slots = timing.slots if timing is not None else ()
    return min((slot.thread_seconds / len(slot.calls_ns) for slot in slots if slot.thread_seconds), default=0.0)


def _late_handicaps(record: Record, reference: Record) -> Iterator[str]:
    """Compares what steps did after their timing, while their operators were recorded."""
    own, theirs = record.late, reference.late
    if own is None or theirs is None:
        return
    if max(own.subnormal, theirs.subnormal) > _SUBNORMAL:
        shares = units.percent(theirs.subnormal, 0), units.percent(own.subnormal, 0)
        yield f"has {shares[0]} subnormal numbers in its results, this case {shares[1]}: a processor is slow at them"
    if own.switches != theirs.switches:
        sets, this = (", ".join(late.switches) or "no switch" for late in (theirs, own))
        yield f"sets {sets} within its steps, this case {this}"
    if not own.in_operators or not theirs.in_operators:
        return
    steps = _of_thread(record.timing), _of_thread(reference.timing)
    outside = max(0.0, steps[0] - own.in_operators), steps[1] - theirs.in_operators
    if min(steps) > 0 and outside[1] - outside[0] > _OUTSIDE_SECONDS:
        words = "spends {} of its time outside of torch's operators, this case {}"
        yield from _more(outside[1] / steps[1], outside[0] / steps[0], _MORE_OUTSIDE, words)
    if record.tape is None or reference.tape is None:
        return
    products = {operator.operator for operator in reference.tape.operators if operator.flops}
    for name, spent in theirs.seconds:
        extra = spent - dict(own.seconds).get(name, 0.0)
        calls = [_calls_of(tape, name) for tape in (reference.tape, record.tape)]
        slow = extra > _MORE_IN_OPERATOR * theirs.in_operators and calls[0] > _CALLED_MORE * calls[1]
        if slow and name not in products | _COPIES:
            share = units.percent(spent / theirs.in_operators, 0)
            yield f"spends {share} of its operators' time in {name}, which this case calls less"


def _calls_of(tape: Tape, name: str) -> float:
    """Returns how often a step calls an operator, weighted by the numbers that it moves, if any."""
    return _moved_by(tape, {name}) + sum(count.calls for count in tape.operators if count.operator == name)


def _in_pieces(tape: Tape, reference: Tape) -> Iterator[str]:
    """Compares the calls that products take; a kernel of many products at once is a case's own merit."""
    own, theirs = (sum(count.calls for count in each.operators if count.flops) for each in (tape, reference))
    grouped = any("grouped" in count.operator for count in tape.operators)
    if own and theirs >= _MORE_PIECES * own and not (grouped or tape.fused or reference.fused):
        yield f"multiplies in {theirs} calls, this case in {own}"


def _held_otherwise(record: Record, reference: Record) -> Iterator[str]:
    """Describes a reference that holds more tensors of a shape than its step reads, and than the case: each step finds
    others, and none of them in a cache. Or its tensors lie otherwise."""
    assert reference.tape is not None
    reads: dict[int, int] = {}
    for operator in reference.tape.operators:
        for words in operator.inputs:
            size = math.prod(map(int, filter(None, words.partition("[")[2].rstrip("]").split(","))))
            reads[size] = reads.get(size, 0) + operator.calls
    own = {given.shape: given for given in record.products.given} if record.products else {}
    for given in reference.products.given if reference.products else ():
        mine, read = own.get(given.shape), reads.get(math.prod(given.shape), 0)
        which = f"{given.tensors} tensors of {' x '.join(map(str, given.shape))}"
        if mine is not None and given.tensors > max(2 * read, mine.tensors):
            yield f"holds {which}, of which a step reads {read}; this case holds {mine.tensors}"
        elif mine is not None and given.scattered > mine.scattered:
            yield f"has numbers of {which} scattered in memory, this case side by side"


def _far_below(record: Record, reference: Record) -> Iterator[str]:
    """Describes a reference's products that are far below their ceiling: large ones, or any where the case's come
    much nearer. Attention has a phase of its own."""
    own, (share, each), timing = _of_ceiling(record)[0], _of_ceiling(reference), reference.timing
    if timing is None or timing.num_rounds < verdicts.LEAST_FOR_VERDICT or contended(timing):
        return
    if share < _LOW_SHARE and each >= (_LONG_SECONDS if own >= _NEARER * share else _LARGE_SECONDS):
        of_both = [units.percent(value, 0) for value in (share, own)]
        yield f"multiplies at {of_both[0]} of what this machine does in its dtype, this case at {of_both[1]}"


def _of_ceiling(record: Record) -> tuple[float, float]:
    """Returns the least time of the matrix products of a step over that of their phase, and the least time of each."""
    tape, ceiling, timing = record.tape, record.ceiling, record.timing
    products = (
        [operator for operator in tape.operators if operator.flops and operator.phase == Phase.GEMM] if tape else []
    )
    if tape is None or tape.fused or ceiling is None or timing is None or not products:
        return 0.0, 0.0
    seconds = dict(verdicts.best_phases(timing)).get(Phase.GEMM, 0.0)
    if not seconds or any("convolution" in product.operator for product in products):  # whose kernels differ by dtype
        return 0.0, 0.0
    bounds, memory = bounds_of(ceiling), ceiling.bytes or math.inf
    rates = [bounds.products.get(kind_of_path(product.path)) or ceiling.flops or math.inf for product in products]
    pairs = zip(products, rates, strict=True)
    least = sum(count.calls * max((count.flops or 0) / rate, count.bytes / memory) for count, rate in pairs)
    return least / seconds, least / sum(product.calls for product in products)


def _moves_more(tape: Tape, reference: Tape) -> Iterator[str]:
    """Compares counts of numbers, whatever their width: a case's casts are more, not fewer."""
    if any(each.fused or each.unwritten for each in (tape, reference)):
        return
    own, theirs = (sum(_numbers(each).values()) for each in (tape, reference))
    words = "moves {} of its numbers in fp64, this case {}"
    yield from _more(
        _numbers(reference).get("fp64", 0.0) / (theirs or 1),
        _numbers(tape).get("fp64", 0.0) / (own or 1),
        _MORE_WIDE,
        words,
    )
    more = _copied(reference) - _copied(tape)
    if own and theirs >= _MOVES_MORE * own:
        yield f"moves {theirs / own:.1f} times the numbers that this case moves"
    elif more > _MORE_COPIES * theirs:
        yield f"moves {units.percent(more / theirs, 0)} of its numbers in copies that this case does not make"


def _numbers(tape: Tape) -> dict[str, float]:
    """Returns how many numbers a step moves, by their dtype."""
    numbers: dict[str, float] = {}
    for phase in tape.phases:
        for dtype, size in phase.by_dtype:
            numbers[dtype] = numbers.get(dtype, 0.0) + 8 * size / (bits_of(dtype) or 8)
    return numbers


def _copied(tape: Tape) -> float:
    """Returns how many numbers copies read and write, casts included."""
    return _moved_by(tape, _COPIES)


def _moved_by(tape: Tape, names: Collection[str]) -> float:
    """Returns how many numbers operators of these names read and write."""
    numbers = 0.0
    for operator in tape.operators:
        if operator.operator in names and operator.outputs:
            widths = [bits_of(words.partition("[")[0]) or 8 for words in (*operator.inputs, *operator.outputs)]
            numbers += 8 * operator.calls * operator.bytes * len(widths) / sum(widths)
    return numbers


def _wider(record: Record, reference: Record) -> Iterator[str]:
    """Describes a reference with products in wider dtypes than its narrowest, beyond the case's. A model as it came
    may have them."""
    assert record.tape is not None and reference.tape is not None
    paths = reference.tape.by_path.items() if reference.case.precision != UNTOUCHED else ()
    narrowest = min((bits_of(path) for path, flops in paths if flops > _MORE_WIDE * reference.tape.flops), default=64)
    own, share = (
        sum(flops for path, flops in tape.by_path.items() if bits_of(path) > narrowest) / max(tape.flops, 1)
        for tape in (record.tape, reference.tape)
    )
    in_casts = [product_work(tape).rotations / max(tape.flops, 1) for tape in (reference.tape, record.tape)]
    words = "multiplies {} of its FLOPs in its casts, this case {}"
    yield from _more(in_casts[0], in_casts[1], _MORE_WIDE, words)
    words = f"multiplies {{}} of its FLOPs in more than {narrowest} bits, this case {{}}"
    yield from _more(share, own, _MORE_WIDE, words)
