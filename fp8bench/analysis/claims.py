"""Labels for claims of a workload that cannot be: they need no word of the workload's own code.

Its steps are checked against what they return, its work against its operators, its throughput against what the machine
does at most, its precision against what its products ran on, its reference for handicaps.
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
from fp8bench.model.run import BENCH
from fp8bench.model.specs import LOSS_ERROR, PEAKS
from fp8bench.model.words import UNTOUCHED
from fp8bench.protocols.axes import VALUES
from fp8bench.registry import precisions, workloads

# A claim may exceed what the machine was seen to do by this factor. The highest of fp8bench's own suites, on one core
# of an AMD EPYC (Zen 5), is a 3x3 convolution in fp32 at 1.1 times the best product; Winograd's products need 2.25
# times fewer FLOPs than are counted. Bytes came to 0.4 times the best copy, and those of 16-bit tensors may be counted
# as fp32's four.
MARGIN = 2.5
# The bits of the elements of an unknown precision: more than any kernel's.
_ANY = 64
# If the declared FLOPs exceed the tape's by more than this factor, they were not done. If the tape has so many times
# more, it is another step: recomputed activations make 4/3 of it, scores of a masked square 2.
_SLACK = 1.05
_MORE = 4.0
# FLOPs that differ from the reference's by more than this share are those of another step.
_OTHER = 0.05
# Bytes are declared in the dtype that tensors come in: four bytes may be declared where one is read.
_WIDER = 4.0
# The margin of products that the tape has counted, on a GPU: the search may have missed its best shape by so much.
# Convolutions are exempt, because they may take fewer products than are counted.
COUNTED_MARGIN = 1.25
_FEWER = "convolution"
# The margin of plain products in fp32 on a processor, whose clock moves more: of six suites 1.0 was the highest. In
# bf16, for which the search has little time where a processor lacks it, a vector times a matrix came to 2.6 times the
# best. Attention may leave out what a mask hides.
PLAIN_MARGIN = 1.5
_PLAIN = frozenset({"mm", "addmm", "bmm", "baddbmm"})
# A format of m bits of mantissa rounds values by this over 2^m, relatively. The errors of fp8bench's own suites on
# normal and uniform values are at least 1.4 times as large; integers may lie on a format's grid, where nothing is
# rounded.
_ROUNDS = 0.19
_ROUNDED = frozenset({"normal", "uniform"})
_FAR_BELOW = 20


def claims_of(record: Record, reference: Record | None, threads: int = 1) -> Iterator[Labelled]:
    """Yields labels of a case that was timed. After a hard one it is not what it is called, and gets no verdict."""
    yield from _no_work(record)
    yield from _above_ceiling(record)
    mismatches = [*_work_mismatch(record), *_other_work(record, reference)]  # of both the graver one is told
    mismatches += _cast_before(record, reference)
    yield from sorted(mismatches, key=lambda mismatch: not mismatch.hard)[:1]
    yield from _fallback(record, reference)
    yield from handicaps_of(record, reference, threads)


def _no_work(record: Record) -> Iterator[Labelled]:
    if record.effect is not None and record.effect.changes is False:
        yield Labelled(Label.NO_WORK, record.effect.why, hard=True)
    elif record.tape == Tape() and record.work.flops and (record.effect is None or not record.effect.changes):
        declared = units.count(record.work.flops, "FLOP")
        yield Labelled(Label.NO_WORK, f"its steps call no operator of torch, and declare {declared}", hard=True)


def _work_mismatch(record: Record) -> Iterator[Labelled]:
    """Compares the declared work with the tape's, which has too little where an operator has no formula or is not
    torch's, and none of the bytes that ranks send each other."""
    tape, work = record.tape, record.work
    if tape is None or not tape.operators:
        return
    declared, did = units.count(work.flops, "FLOP"), units.count(tape.flops, "FLOP")
    if tape.complete and work.flops > _SLACK * tape.flops:
        yield Labelled(Label.WORK_MISMATCH, f"it declares {declared} a step, its operators do {did}", hard=True)
    elif record.case.ranks < 2 and tape.unwritten == 0 and work.bytes > _WIDER * tape.bytes:
        declared, did = units.size(int(work.bytes)), units.size(tape.bytes)
        yield Labelled(Label.WORK_MISMATCH, f"it declares {declared} a step, its operators move {did}", hard=True)
    elif tape.complete and (late := _late_work(record, tape)):
        yield Labelled(Label.WORK_MISMATCH, late, hard=True)
    elif work.flops and tape.flops > _MORE * work.flops:
        yield Labelled(Label.WORK_MISMATCH, f"it declares {declared} a step, its operators do {did}")


def _late_work(record: Record, tape: Tape) -> str:
    """Describes what a step multiplies with the clock where that is not what it multiplies untimed; else ''."""
    if record.late_flops is not None and _differ(record.late_flops, tape.flops):
        now, untimed = (units.count(flops, "FLOP") for flops in (record.late_flops, tape.flops))
        return f"a step with the clock does {now}, one that is not timed {untimed}"
    late = record.late
    if late is None or late.by_path is None or late.varies:
        return ""
    for path, flops in late.by_path:
        before = tape.by_path.get(path, 0)
        if flops - before > _OTHER * tape.flops:
            now, untimed = (units.count(count, "FLOP") for count in (flops, before))
            return f"a step with the clock does {now} in {path}, one that is not timed {untimed}"
    return ""


def _differ(flops: float, others: float) -> bool:
    return abs(flops - others) > _OTHER * max(flops, others)


def _other_work(record: Record, reference: Record | None) -> Iterator[Labelled]:
    """Compares its products with those of the reference's step, whatever both declare. Callables may reach the same
    results by other products."""
    own, base = record.tape, reference.tape if reference is not None and reference is not record else None
    if record.case.workload == BENCH:
        return
    if own is None or base is None or not (own.operators or base.operators):
        return
    if not (own.complete and base.complete):
        return
    work, wanted = product_work(own, base), product_work(base).useful
    assert reference is not None
    hard, name = _differ(work.useful, wanted), record.case.workload
    # Of what chooses its own way any other product is told: a little less work is a little less time.
    own_paths = name in workloads.names(hidden=True) and workloads.get(name).own_paths
    if not hard and (on_average := _varying_work(record, reference)):
        yield Labelled(Label.WORK_MISMATCH, on_average)
        return
    if not hard and not (own_paths and (work.useful, work.padding) != (wanted, 0)):
        return
    did, others = (units.count(flops, "FLOP") for flops in (work.useful, wanted))
    apart = ((units.count(flops, "FLOP"), spec.removesuffix("_flops")) for spec, flops in work.apart.items())
    beside = "".join(f", {flops} of {what}" for flops, what in apart)
    yield Labelled(
        Label.WORK_MISMATCH, f"its products do {did} a step{beside}, {reference.case.mode}'s do {others}", hard=hard
    )


def _cast_before(record: Record, reference: Record | None) -> Iterator[Labelled]:
    """Yields a doubt of a case whose weights were cast while it was prepared: no step has the time of that."""
    count = record.products.cast_before if record.products is not None else 0
    if count and reference not in (None, record):
        many = f"{count} weights that were" if count > 1 else "a weight that was"
        yield Labelled(
            Label.WORK_MISMATCH,
            f"its products read {many} cast to {record.case.mode} while preparing, which no step does: cast within the "
            "step, or name them MemoryRole.LOW_WEIGHTS in memory_roles, if they are kept so",
        )


def _varying_work(record: Record, reference: Record) -> str:
    """Describes steps that multiply unlike much, and on average another amount than the reference's; else ''."""
    own, base = record.late, reference.late
    if own is None or base is None or own.flops is None or base.flops is None or not (own.varies or base.varies):
        return ""
    if not _differ(own.flops, base.flops):
        return ""
    did, others = (units.count(flops, "FLOP") for flops in (own.flops, base.flops))
    return f"not all of its steps do the same products: {did} on average, {reference.case.mode}'s {others}"


def _above_ceiling(record: Record) -> Iterator[Labelled]:
    if record.ceiling is None or record.timing is None or not (seconds := verdicts.best_seconds(record.timing)):
        return
    if why := next(_phases_above(record, record.ceiling), None):
        yield Labelled(Label.ABOVE_CEILING, why, hard=True)
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
    """Yields phases that did more than the device can, by what the tape has counted.

    Of a compiled step only the products are compared, as a whole: bytes and launches are unknown, and so is the phase
    of a fused kernel, but no compiler does without products.
    """
    assert record.timing is not None
    if record.tape is None or (record.late is not None and record.late.varies):  # a quick step may have done less
        return
    bounds = bounds_of(ceiling)
    if record.tape.fused:
        least = bounds.product_seconds(record.tape.by_path.items())
        least = least if least is not None else record.tape.flops / (ceiling.flops or math.inf)
        if least > MARGIN * (seconds := verdicts.best_seconds(record.timing)):
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
    """Suites without products are exempt, because it is unknown what a precision could change in them."""
    why = _of_products(record) or _in_fp64(record, reference)
    if not why and record.products is not None and record.products.low and reference not in (None, record):
        assert reference is not None
        same = _same_errors(record, reference)
        why = f"{', '.join(same)} exactly {reference.case.mode}'s" if same else ""
    if why:
        yield Labelled(Label.FALLBACK, why, hard=True)
    elif doubt := _too_small_errors(record) or _unseen_products(record, reference):
        yield Labelled(Label.FALLBACK, doubt)


def _unseen_products(record: Record, reference: Record | None) -> str:
    """Names operators that may multiply in place of the reference's products, and are given nothing in the case's
    formats; '' where there are none."""
    products, tape = record.products, record.tape
    if products is None or products.low is not False or tape is None or reference in (None, record):
        return ""
    unknown = dict.fromkeys(operator.operator for operator in tape.operators if operator.flops is None)
    assert reference is not None
    if not unknown or reference.tape is None or not reference.tape.flops:
        return ""
    return (
        f"no product of {record.case.mode}'s formats was seen: it calls {', '.join(unknown)}, of which nobody knows "
        "what they multiply"
    )


def _too_small_errors(record: Record) -> str:
    """Describes an error() that is too small for products that were seen to be of the case's formats; else ''.

    This is a doubt: error() may compare with what was rounded before, and a suite's own values may lie on the grid. A
    loss is a mean of many numbers, which may be right by chance, but not to the last bit.
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
    """Returns by how much the finest of these precisions rounds values; 0 where one of them is unknown."""
    formats = [
        [FORMATS[name]] if name in FORMATS else [treatment.fmt for treatment in _treatments(name)] for name in names
    ]
    if not all(formats):
        return 0.0
    return _ROUNDS * 2.0 ** -max(number_format.mantissa_bits for several in formats for number_format in several)


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


def _in_fp64(record: Record, reference: Record | None) -> str:
    """Describes products in fp64; any precision is fast beside a reference with them. Models and callables may come
    with them."""
    if record.case.workload == BENCH or UNTOUCHED in (
        record.case.precision,
        reference.case.precision if reference is not None else "",
    ):
        return ""
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
    """Returns the errors that are equal to the last bit, if all are and one is not 0."""
    own, theirs = (
        {error.metric: error.samples for error in own_record.measurements if error.metric not in PEAKS}
        for own_record in (record, reference)
    )
    return list(own) if own == theirs and any(any(samples) for samples in own.values()) else []
