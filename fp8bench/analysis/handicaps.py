"""Whether a reference is handicapped: low precision is fast beside what is slower than it need be.

Other inputs than the case's, or none that a processor multiplies at its pace; products far below what the device does,
where the case's are not; numbers that it moves or copies and the case does not; wider products; sleep.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from fp8bench import units
from fp8bench.analysis import verdicts
from fp8bench.analysis.datasheet import kind_of_path
from fp8bench.analysis.labels import Labelled, contended
from fp8bench.analysis.roofline import bounds_of
from fp8bench.analysis.tapes import bits_of
from fp8bench.errors import UsageError
from fp8bench.model import GivenTensors, Label, Level, Phase, Record, Tape, Timing
from fp8bench.model.words import UNTOUCHED
from fp8bench.registry import precisions

# Rounding to four bits moves a root mean square by 2% at most.
_OTHER_SIZE = 0.1
_SUBNORMAL = 0.01
# Sums of other numbers differ by more than this many root sums of squares, once in seven times by less; rounding to
# four bits moves them by 0.1, and what it does to all alike by so much of the sum.
_OTHER_SUM, _ALIKE = 0.25, 0.02
# Of its ceiling, at which products take so long each; shorter ones only where the case's come so many times nearer to
# theirs. fp8bench's own in fp32 are at 0.65 and more where a core is their own, convolutions at 0.2.
_FAR_BELOW, _LARGE_SECONDS, _LONG_SECONDS, _NEARER = 1 / 3, 1e-3, 1e-4, 2.0
_MOVES_MORE = 2.0
_COPIES = frozenset({"clone", "copy_", "_to_copy"})
_MORE_COPIES = 0.1
_MORE_WIDE = 0.05
_MORE_SLEEP = 0.1


def handicaps_of(record: Record, reference: Record | None) -> Iterator[Labelled]:
    """Of a case beside its reference. Hard: other inputs, by size or subnormals, and a reference that sleeps."""
    if reference is None or reference is record:
        return
    yield from _other_inputs(record, reference)
    if Level.EMULATED in (record.support.level, reference.support.level) or not record.paired:
        return
    asleep = _sleeps(record.timing, reference.timing) if record.case.device == "cpu" and record.case.ranks < 2 else ""
    told = [*_far_below(record, reference), asleep]
    if record.tape is not None and reference.tape is not None:
        told += [*_moves_more(record.tape, reference.tape), *_wider(record, reference)]
    if whys := "; ".join(filter(None, told)):
        yield Labelled(Label.HANDICAP, f"{reference.case.mode} {whys}", hard=bool(asleep))


def _other_inputs(record: Record, reference: Record) -> Iterator[Labelled]:
    """Where both are given as many tensors of a shape; what a precision has in its own formats is none of them."""
    own = {given.shape: given for given in record.products.given} if record.products else {}
    theirs, mode = reference.products.given if reference.products else (), reference.case.mode
    pairs = [
        (mine, given) for given in theirs if (mine := own.get(given.shape)) and mine.tensors == given.tensors
    ]  # fmt: skip
    times = _loss_scale(record) / _loss_scale(reference)
    pairs = [(_scaled(mine, given, times), given) for mine, given in pairs]
    for mine, given in pairs:
        if why := _unlike(mine, given, mode):
            yield Labelled(Label.OTHER_INPUTS, why, hard=True)
            return
    if pairs and math.sqrt(sum(_apart(*pair) for pair in pairs) / len(pairs)) > _OTHER_SUM:
        yield Labelled(Label.OTHER_INPUTS, f"of {mode}'s size, and other numbers")


def _loss_scale(record: Record) -> float:
    """1 of a precision that is not known here."""
    try:
        return precisions.get(record.case.precision).loss_scale or 1.0
    except UsageError:
        return 1.0


def _scaled(mine: GivenTensors, theirs: GivenTensors, times: float) -> GivenTensors:
    """As it came, or without the loss scale that gradients have in fp16: what is nearer to the reference's size."""
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
    """The square of how far their sums differ, over the sum of squares: about 2 for other numbers."""
    far = max(0.0, abs(mine.total - theirs.total) - _ALIKE * abs(theirs.total))
    return far**2 / theirs.squares if theirs.squares else 0.0


def _sleeps(timing: Timing | None, reference: Timing | None) -> str:
    """Time in which its process neither ran nor waited for a core, beyond the case's."""
    own, share = (_asleep(one) if one is not None else None for one in (timing, reference))
    if own is None or share is None or share - own <= _MORE_SLEEP:
        return ""
    return f"sleeps {units.percent(share, 0)} of its time, this case {units.percent(own, 0)}"


def _asleep(timing: Timing) -> float | None:
    """The share of the median slot; None where nobody knows who waited for a core."""
    shares = [
        1 - (slot.cpu_seconds + slot.waited_seconds + (slot.stolen_seconds or 0.0)) / slot.wall_seconds
        for slot in timing.slots
        if slot.waited_seconds is not None and slot.wall_seconds > 0
    ]
    return max(0.0, float(np.median(shares))) if shares else None


def _far_below(record: Record, reference: Record) -> Iterator[str]:
    """Its products, where they are large, or the case's come much nearer. Attention has a phase of its own."""
    own, (share, each), timing = _of_ceiling(record)[0], _of_ceiling(reference), reference.timing
    if timing is None or timing.num_rounds < verdicts.LEAST_FOR_VERDICT or contended(timing):
        return
    if share < _FAR_BELOW and each >= (_LONG_SECONDS if own >= _NEARER * share else _LARGE_SECONDS):
        of_both = [units.percent(value, 0) for value in (share, own)]
        yield f"multiplies at {of_both[0]} of what this machine does in its dtype, this case at {of_both[1]}"


def _of_ceiling(record: Record) -> tuple[float, float]:
    """The least that the products of a step's matrices take over what their phase took, and the least of each."""
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
    """By numbers, whatever their width: a case's casts are more, not fewer."""
    if any(one.fused or one.unwritten for one in (tape, reference)):
        return
    own, theirs = map(_numbers, (tape, reference))
    more = _copied(reference) - _copied(tape)
    if own and theirs >= _MOVES_MORE * own:
        yield f"moves {theirs / own:.1f} times the numbers that this case moves"
    elif more > _MORE_COPIES * theirs:
        yield f"moves {units.percent(more / theirs, 0)} of its numbers in copies that this case does not make"


def _numbers(tape: Tape) -> float:
    return sum(8 * size / (bits_of(dtype) or 8) for phase in tape.phases for dtype, size in phase.by_dtype)


def _copied(tape: Tape) -> float:
    """The numbers that copies read and write, casts included."""
    found = 0.0
    for operator in tape.operators:
        if operator.operator in _COPIES and operator.outputs:
            widths = [bits_of(words.partition("[")[0]) or 8 for words in (*operator.inputs, *operator.outputs)]
            found += 8 * operator.calls * operator.bytes * len(widths) / sum(widths)
    return found


def _wider(record: Record, reference: Record) -> Iterator[str]:
    """A part of its products in a wider dtype than its narrowest, beyond the case's. A model as it came may be so."""
    assert record.tape is not None and reference.tape is not None
    paths = reference.tape.by_path.items() if reference.case.precision != UNTOUCHED else ()
    narrowest = min((bits_of(path) for path, flops in paths if flops > _MORE_WIDE * reference.tape.flops), default=64)
    own, share = (
        sum(flops for path, flops in tape.by_path.items() if bits_of(path) > narrowest) / max(tape.flops, 1)
        for tape in (record.tape, reference.tape)
    )
    if share - own > _MORE_WIDE:
        of_both = [units.percent(value, 0) for value in (share, own)]
        yield f"multiplies {of_both[0]} of its FLOPs in more than {narrowest} bits, this case {of_both[1]}"
