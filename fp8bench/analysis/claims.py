"""What a workload says of itself, held against what can be: labels that foreign code cannot argue away.

Its steps against what they give; its work against its operators; its throughput against the most that the machine
does; its time against that of other sizes; its precision against what its products ran on.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence

from fp8bench import units
from fp8bench.analysis import verdicts
from fp8bench.analysis.handicaps import handicaps_of
from fp8bench.analysis.labels import Labelled
from fp8bench.analysis.roofline import bounds_of
from fp8bench.analysis.tapes import product_work
from fp8bench.errors import UsageError
from fp8bench.formats.grids import FORMATS
from fp8bench.formats.hardware import foreign_kernel
from fp8bench.formats.recipes import Recipe, Treatment
from fp8bench.model import Ceiling, Label, Record, Tape
from fp8bench.model.specs import LOSS_ERROR, PEAKS
from fp8bench.protocols.axes import VALUES
from fp8bench.registry import precisions, workloads

# The most that a claim may be above what the machine was seen to do. Of fp8bench's own suites, on one core of an AMD
# EPYC (Zen 5), the highest is a 3x3 convolution in fp32 at 1.1 times the best product; Winograd's products need 2.25
# times fewer FLOPs than are counted. Bytes came to 0.4 times the best copy, and those of 16-bit tensors may be counted
# in fp32's four.
MARGIN = 2.5
# More bits than any kernel's: of the elements of a precision that is not known here.
_ANY = 64
# Where the tape has fewer FLOPs than are declared by more than this, the declared ones were not done. Where it has so
# many times more, it is another step: recomputed activations make 4/3 of it, scores of a masked square 2.
_SLACK = 1.05
_MORE = 4.0
# Beside the reference's, whose step it is in another precision.
_OTHER = 0.05
# Bytes are declared in the dtype that tensors come in, which may be four bytes where a byte is read.
_WIDER = 4.0
# The same of products that the tape has counted, on a GPU: the search may have missed its best shape by so much.
# Convolutions may take fewer products than are counted.
COUNTED_MARGIN = 1.25
_FEWER = "convolution"
# Of plain ones in fp32 on a processor, whose clock moves by more: of six suites 1.0 was the highest. In bf16, which the
# search has little time for where a processor lacks it, a vector times a matrix came to 2.6 times the best; attention
# may leave out what a mask hides.
PLAIN_MARGIN = 1.5
_PLAIN = frozenset({"mm", "addmm", "bmm", "baddbmm"})
# A format of m bits of mantissa rounds values by this over 2^m, relative. Of normal and uniform values errors of
# fp8bench's own suites are 1.4 times as large and more; integers may lie on a format's grid, where nothing is rounded.
_ROUNDS = 0.19
_ROUNDED = frozenset({"normal", "uniform"})
_FAR_BELOW = 20


def claims_of(record: Record, reference: Record | None) -> Iterator[Labelled]:
    """Of a case that was timed. Hard: what was measured is not what it is called, and a verdict on it would be none."""
    yield from _no_work(record)
    yield from _above_ceiling(record)
    mismatches = [*_work_mismatch(record), *_other_work(record, reference)]  # of both the graver one is told
    yield from sorted(mismatches, key=lambda mismatch: not mismatch.hard)[:1]
    yield from _fallback(record, reference)
    yield from handicaps_of(record, reference)


def _no_work(record: Record) -> Iterator[Labelled]:
    if record.effect is not None and record.effect.changes is False:
        yield Labelled(Label.NO_WORK, record.effect.why, hard=True)
    elif record.tape == Tape() and record.work.flops and (record.effect is None or not record.effect.changes):
        declared = units.count(record.work.flops, "FLOP")
        yield Labelled(Label.NO_WORK, f"its steps call no operator of torch, and declare {declared}", hard=True)


def _work_mismatch(record: Record) -> Iterator[Labelled]:
    """Of what has no formula, or is no operator of torch, a tape has too little: then it is no bound from above. So
    of the bytes that ranks send each other."""
    tape, work = record.tape, record.work
    if tape is None or not tape.operators:
        return
    whole = not tape.unknown and not tape.unwritten
    declared, did = units.count(work.flops, "FLOP"), units.count(tape.flops, "FLOP")
    if whole and work.flops > _SLACK * tape.flops:
        yield Labelled(Label.WORK_MISMATCH, f"it declares {declared} a step, its operators do {did}", hard=True)
    elif record.case.ranks < 2 and tape.unwritten == 0 and work.bytes > _WIDER * tape.bytes:
        declared, did = units.size(int(work.bytes)), units.size(tape.bytes)
        yield Labelled(Label.WORK_MISMATCH, f"it declares {declared} a step, its operators move {did}", hard=True)
    elif (late := record.late_flops) is not None and whole and not tape.fused and _differ(late, tape.flops):
        now = units.count(late, "FLOP")
        yield Labelled(Label.WORK_MISMATCH, f"a step with the clock does {now}, one that is not timed {did}", hard=True)
    elif work.flops and tape.flops > _MORE * work.flops:
        yield Labelled(Label.WORK_MISMATCH, f"it declares {declared} a step, its operators do {did}")


def _differ(flops: int, others: int) -> bool:
    return abs(flops - others) > _OTHER * max(flops, others)


def _other_work(record: Record, reference: Record | None) -> Iterator[Labelled]:
    """Whether its products are those of the reference's step, whatever both declare."""
    own, base = record.tape, reference.tape if reference is not None and reference is not record else None
    if own is None or base is None or not (own.operators or base.operators):
        return
    if any(tape.unknown or tape.unwritten for tape in (own, base)):
        return
    work, wanted = product_work(own, base), product_work(base).useful
    assert reference is not None
    hard = _differ(work.useful, wanted)
    # Of what chooses its own way any other product is told: a little less work is a little less time.
    if not hard and not (_own_paths(record) and (work.useful, work.padding) != (wanted, 0)):
        return
    did, others = (units.count(flops, "FLOP") for flops in (work.useful, wanted))
    apart = ((units.count(flops, "FLOP"), spec.removesuffix("_flops")) for spec, flops in work.apart.items())
    beside = "".join(f", {flops} of {what}" for flops, what in apart)
    yield Labelled(
        Label.WORK_MISMATCH, f"its products do {did} a step{beside}, {reference.case.mode}'s do {others}", hard=hard
    )


def _own_paths(record: Record) -> bool:
    name = record.case.workload
    return name in workloads.names(hidden=True) and workloads.get(name).own_paths


def _above_ceiling(record: Record) -> Iterator[Labelled]:
    if record.ceiling is None or not (seconds := _best(record)):
        return
    if found := next(_phases_above(record, record.ceiling), None):
        yield Labelled(Label.ABOVE_CEILING, found, hard=True)
        return
    for count, bound, unit, did in (
        (record.work.flops, record.ceiling.flops, "FLOP/s", "multiplied"),
        (record.work.bytes, record.ceiling.bytes, "B/s", "copied"),
    ):
        if bound is not None and count / seconds > MARGIN * bound:
            claimed, most = units.count(count / seconds, unit), units.count(bound, unit)
            yield Labelled(Label.ABOVE_CEILING, f"claims {claimed}, this machine {did} {most} at most", hard=True)
            return


def _phases_above(record: Record, ceiling: Ceiling) -> Iterator[str]:
    """Phases that did more than the device can, by what the tape has counted. Of a compiled step bytes and launches are
    not known, nor which phase its fused kernels are in: its products are, which no compiler does without."""
    assert record.timing is not None
    if record.tape is None:
        return
    bounds = bounds_of(ceiling)
    if record.tape.fused:
        least = bounds.product_seconds(record.tape.by_path.items())
        least = least if least is not None else record.tape.flops / (ceiling.flops or math.inf)
        if least > MARGIN * (seconds := _best(record)):
            did, most = (units.count(record.tape.flops / value, "FLOP/s") for value in (seconds, least))
            yield (
                f"the compiled step did {did} by the tape, this machine multiplied {most} at most: "
                "the compiler left work out"
            )
        return
    fewer = {operator.phase for operator in record.tape.operators if _FEWER in operator.operator}
    for phase, seconds in verdicts.best_phases(record.timing):
        count = record.tape.of(phase)
        if count is None or not seconds:
            continue
        own = bounds.product_seconds(count.by_path)
        if record.case.device == "cpu":
            products = {
                operator.operator for operator in record.tape.operators if operator.phase == phase and operator.flops
            }
            plain = own is not None and bool(products) and products <= _PLAIN and {*dict(count.by_path)} == {"fp32"}
            margin = PLAIN_MARGIN if plain else MARGIN
        else:
            margin = MARGIN if own is None or phase in fewer else COUNTED_MARGIN
        least = own if own is not None else count.flops / (ceiling.flops or math.inf)
        if least > margin * seconds:
            did, most = units.count(count.flops / seconds, "FLOP/s"), units.count(count.flops / least, "FLOP/s")
            yield f"{phase} did {did} by the tape, this machine multiplied {most} at most"
        elif bounds.memory is not None and count.bytes > MARGIN * bounds.memory * seconds:
            did, most = units.count(count.bytes / seconds, "B/s"), units.count(bounds.memory, "B/s")
            yield f"{phase} moved {did} by the tape, this machine copied {most} at most"


def _fallback(record: Record, reference: Record | None) -> Iterator[Labelled]:
    """Suites without products are exempt: what precision could change there is not known."""
    why = _of_products(record) or _in_fp64(record)
    if not why and record.products is not None and record.products.low and reference not in (None, record):
        assert reference is not None
        same = _same_errors(record, reference)
        why = f"{', '.join(same)} exactly {reference.case.mode}'s" if same else ""
    if why:
        yield Labelled(Label.FALLBACK, why, hard=True)
    elif too_small := _too_small_errors(record):
        yield Labelled(Label.FALLBACK, too_small)


def _too_small_errors(record: Record) -> str:
    """What error() says, where products that were seen to be of the case's formats cannot be so exact; '' elsewhere.

    A doubt: it may compare with what was rounded before, and a suite's own values may lie on the grid. A loss is a mean
    of many numbers, which may be right by chance, but not to the last bit.
    """
    errors = {m.metric: max(m.samples) for m in record.measurements if m.metric.endswith("_error") and m.samples}
    telling = {metric: error for metric, error in errors.items() if metric != LOSS_ERROR}
    of_its_own = record.coverage is None and VALUES.of(dict(record.case.params)) in _ROUNDED
    if not errors or not of_its_own or record.products is None or not record.products.low:
        return ""
    rounding = _rounding((record.case.precision, *dict(record.case.precision_map).values()))
    if max(errors.values()) > 0 and max(telling.values(), default=rounding) >= rounding / _FAR_BELOW:
        return ""
    told = ", ".join(f"{metric} {units.relative_error(error)}" for metric, error in errors.items())
    rounds = f"{record.case.mode} rounds each value by about {units.relative_error(rounding)}"
    return f"its error() says {told}: too little, for {rounds}" if rounding else ""


def _rounding(names: Iterable[str]) -> float:
    """By how much the finest of these precisions rounds values; 0 where that is not known of one of them."""
    formats = [
        [FORMATS[name]] if name in FORMATS else [treatment.fmt for treatment in _treatments(name)] for name in names
    ]
    if not all(formats):
        return 0.0
    return _ROUNDS * 2.0 ** -max(one.mantissa_bits for several in formats for one in several)


def _of_products(record: Record) -> str:
    products, mode = record.products, record.case.mode
    if products is None:
        return ""
    ran = f"{products.count} product{'s' * (products.count > 1)}, of {' and '.join(products.operands)}"
    if products.count and products.low is False:
        return f"{ran}: none has an operand of {mode}'s formats"
    if products.wide:
        return f"{ran}: values of {mode}'s formats, and none as its codes"
    if products.looks_like:
        return f"the numbers of a product are those of {products.looks_like}"
    bits = max((treatment.fmt.bits for treatment in _treatments(record.case.precision)), default=_ANY)
    foreign = foreign_kernel(products.kernels, bits) if products.kernels else ""
    return f"its products ran in the kernel {foreign}" if foreign else ""


def _in_fp64(record: Record) -> str:
    """No precision multiplies in it: beside such a reference anything is fast."""
    flops = record.tape.by_path.get("fp64", 0) if record.tape is not None else 0
    if record.tape is None or flops <= _OTHER * record.tape.flops:
        return ""
    return f"{units.count(flops, 'FLOP')} of its {units.count(record.tape.flops, 'FLOP')} a step are in fp64"


def _treatments(precision: str) -> Sequence[Treatment]:
    try:
        recipe = getattr(precisions.get(precision), "recipe", None)
    except UsageError:
        return ()
    return recipe.treatments if isinstance(recipe, Recipe) else ()


def _same_errors(record: Record, reference: Record) -> list[str]:
    """The errors of both, where they are equal to the last bit; none where there is no error at all."""
    own, theirs = (
        {error.metric: error.samples for error in one.measurements if error.metric not in PEAKS}
        for one in (record, reference)
    )
    return list(own) if own == theirs and any(any(samples) for samples in own.values()) else []


def _best(record: Record) -> float:
    return sum(seconds for _, seconds in verdicts.best_phases(record.timing)) if record.timing else 0.0
