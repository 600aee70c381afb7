"""Labels for claims of a workload that cannot be true, without trusting the workload's code.

Its steps are checked against their results, its work against its operators, its throughput against the machine's peak,
its precision against the products that ran, its reference for handicaps.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence

from fp8bench import units
from fp8bench.analysis import verdicts
from fp8bench.analysis.handicaps import handicaps_of
from fp8bench.analysis.labels import Labelled
from fp8bench.analysis.roofline import Roofs, bounds_of
from fp8bench.analysis.tapes import product_work
from fp8bench.errors import UsageError
from fp8bench.formats.grids import FORMATS
from fp8bench.formats.hardware import foreign_kernel
from fp8bench.formats.recipes import Recipe, Treatment
from fp8bench.model import Ceiling, Label, Record, Tape
from fp8bench.model.run import BENCH
from fp8bench.model.specs import LOSS_ERROR, PEAKS
from fp8bench.model.step import PhaseCount
from fp8bench.model.words import UNTOUCHED
from fp8bench.protocols.axes import VALUES
from fp8bench.registry import precisions, workloads

# A claim may exceed the measured peak of the machine by this factor. The highest claim of fp8bench's suites, on one
# core of an AMD EPYC (Zen 5), is a 3x3 convolution in fp32 at 1.1 times the best product; Winograd's algorithm needs
# 2.25 times fewer FLOPs than are counted. Bytes reached 0.4 times the best copy; those of 16-bit tensors may be counted
# as four bytes, as in fp32.
MARGIN = 2.5
# Bits per element assumed for an unknown precision: more than any kernel has.
_ANY = 64
# If the declared FLOPs exceed the tape's by more than the first factor, some were not done. If the tape exceeds the
# declared ones by the second factor, it recorded a different step: recomputed activations give a factor of 4/3, a
# masked square of scores 2.
_SLACK = 1.05
_MORE = 4.0
# If FLOPs differ from the reference's by more than this share, the steps are different.
_DIFFERENT = 0.05
# Bytes are declared in the input dtype of tensors: four bytes may be declared where one is read.
_WIDER = 4.0
# The margin for products counted by the tape, on a GPU: the search for the peak may have missed its best shape by this
# factor. Convolutions are exempt, because they may take fewer products than are counted.
COUNTED_MARGIN = 1.25
_CONVOLUTION = "convolution"
# The margin for plain fp32 products on a CPU, whose clock varies more; the highest of six suites was 1.0. In bf16,
# which is slow and briefly searched on CPUs without support, a vector-matrix product reached 2.6 times the best.
# Attention may skip masked elements.
PLAIN_MARGIN = 1.5
_PLAIN = frozenset({"mm", "addmm", "bmm", "baddbmm"})
# The relative rounding error of a format with m mantissa bits is this over 2^m. fp8bench's suites have at least 1.4
# times this error on normal and uniform values; integers may be exact in a format, where nothing is rounded.
_ROUNDING_ERROR = 0.19
_ROUNDED_VALUES = frozenset({"normal", "uniform"})
_FAR_BELOW = 20


def claims_of(record: Record, reference: Record | None, threads: int = 1) -> Iterator[Labelled]:
    """Yields labels for a timed case whose claims are false. A hard label takes away its verdict.

    `reference` is None for the reference itself, and without one.
    """
    if reference is record:
        reference = None
    for check in CLAIM_CHECKS:
        yield from check(record, reference)
    if reference is not None:
        yield from handicaps_of(record, reference, threads)


def _check_no_work(record: Record, _: Record | None) -> Iterator[Labelled]:
    if record.effect is not None and record.effect.changes is False:
        yield Labelled(Label.NO_WORK, record.effect.why, hard=True)
    elif record.tape == Tape() and record.work.flops and (record.effect is None or not record.effect.changes):
        declared = units.count(record.work.flops, "FLOP")
        yield Labelled(Label.NO_WORK, f"its steps call no operator of torch, and declare {declared}", hard=True)


def _check_work(record: Record, reference: Record | None) -> Iterator[Labelled]:
    """Yields the gravest mismatch between the declared work, the recorded work and the reference's."""
    mismatches = [*_declared_work(record)]
    if reference is not None:
        mismatches += [*_other_work(record, reference), *_cast_before(record)]
    yield from sorted(mismatches, key=lambda mismatch: not mismatch.hard)[:1]


def _declared_work(record: Record) -> Iterator[Labelled]:
    """Compares the declared work with the tape's.

    The tape undercounts operators without a formula or from outside torch, and has no bytes sent between ranks.
    """
    tape, work = record.tape, record.work
    if tape is None or not tape.operators:
        return
    declared, done = units.count(work.flops, "FLOP"), units.count(tape.flops, "FLOP")
    if tape.complete and work.flops > _SLACK * tape.flops:
        yield Labelled(Label.WORK_MISMATCH, f"it declares {declared} a step, its operators do {done}", hard=True)
    elif record.case.ranks < 2 and tape.unwritten == 0 and work.bytes > _WIDER * tape.bytes:
        declared, done = units.size(int(work.bytes)), units.size(tape.bytes)
        yield Labelled(Label.WORK_MISMATCH, f"it declares {declared} a step, its operators move {done}", hard=True)
    elif tape.complete and (late := _late_work(record, tape)):
        yield Labelled(Label.WORK_MISMATCH, late, hard=True)
    elif work.flops and tape.flops > _MORE * work.flops:
        yield Labelled(Label.WORK_MISMATCH, f"it declares {declared} a step, its operators do {done}")


def _late_work(record: Record, tape: Tape) -> str:
    """Describes the products of timed steps if untimed ones multiply something else; else ''."""
    if record.late_flops is not None and _differ(record.late_flops, tape.flops):
        timed, untimed = (units.count(flops, "FLOP") for flops in (record.late_flops, tape.flops))
        return f"a step with the clock does {timed}, one that is not timed {untimed}"
    late = record.late
    if late is None or late.by_path is None or late.varies:
        return ""
    for path, flops in late.by_path:
        untimed_flops = tape.by_path.get(path, 0)
        if flops - untimed_flops > _DIFFERENT * tape.flops:
            timed, untimed = (units.count(count, "FLOP") for count in (flops, untimed_flops))
            return f"a step with the clock does {timed} in {path}, one that is not timed {untimed}"
    return ""


def _differ(flops: float, base: float) -> bool:
    return abs(flops - base) > _DIFFERENT * max(flops, base)


def _other_work(record: Record, reference: Record) -> Iterator[Labelled]:
    """Compares the recorded products with those of the reference's step, regardless of declared work.

    Callables are exempt, because they may compute the same results with other products.
    """
    tape, base = record.tape, reference.tape
    if record.case.workload == BENCH or tape is None or base is None:
        return
    if not (tape.operators or base.operators) or not (tape.complete and base.complete):
        return
    work, useful = product_work(tape, base), product_work(base).useful
    hard, name = _differ(work.useful, useful), record.case.workload
    if not hard and (on_average := _varying_work(record, reference)):
        yield Labelled(Label.WORK_MISMATCH, on_average)
        return
    # A workload that chooses its path must do exactly the same work: slightly less work would take slightly less time.
    chooses_path = name in workloads.names(hidden=True) and workloads.get(name).own_paths
    if not hard and not (chooses_path and (work.useful, work.padding) != (useful, 0)):
        return
    extra = ""
    for spec, flops in work.overhead.items():
        extra += f", {units.count(flops, 'FLOP')} of {spec.removesuffix('_flops')}"
    done, base_done = units.count(work.useful, "FLOP"), units.count(useful, "FLOP")
    reason = f"its products do {done} a step{extra}, {reference.case.mode}'s do {base_done}"
    yield Labelled(Label.WORK_MISMATCH, reason, hard=hard)


def _cast_before(record: Record) -> Iterator[Labelled]:
    """Yields a doubt about a case whose weights were cast during preparation, because no step pays for that cast."""
    count = record.products.cast_before if record.products is not None else 0
    if count:
        weights = f"{count} weights that were" if count > 1 else "a weight that was"
        yield Labelled(
            Label.WORK_MISMATCH,
            f"its products read {weights} cast to {record.case.mode} while preparing, which no step does: cast within "
            "the step, or name them MemoryRole.LOW_WEIGHTS in memory_roles, if they are kept so",
        )


def _varying_work(record: Record, reference: Record) -> str:
    """Describes steps whose products vary, if their mean differs from the reference's; else ''."""
    late, base = record.late, reference.late
    if late is None or base is None or late.flops is None or base.flops is None or not (late.varies or base.varies):
        return ""
    if not _differ(late.flops, base.flops):
        return ""
    done, base_done = (units.count(flops, "FLOP") for flops in (late.flops, base.flops))
    return f"not all of its steps do the same products: {done} on average, {reference.case.mode}'s {base_done}"


def _check_ceiling(record: Record, _: Record | None) -> Iterator[Labelled]:
    """Yields a label if the work on the tape, or else the declared work, exceeds the peak of the machine."""
    if record.ceiling is None or record.timing is None or not (seconds := verdicts.best_seconds(record.timing)):
        return
    if reason := next(_phases_above(record, record.ceiling), None):
        yield Labelled(Label.ABOVE_CEILING, reason, hard=True)
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
    """Describes phases whose work on the tape exceeds what the device can do."""
    # An untimed recording proves nothing about timed steps that may vary.
    if record.tape is None or record.timing is None or (record.late is not None and record.late.varies):
        return
    bounds = bounds_of(ceiling)
    if record.tape.fused:
        yield from _compiled_step_above(record.tape, verdicts.best_seconds(record.timing), bounds, ceiling)
        return
    for phase, seconds in verdicts.best_phases(record.timing):
        count = record.tape.of(phase)
        if count is None or not seconds:
            continue
        bound = bounds.product_seconds(count.by_path)
        least = bound if bound is not None else count.flops / (ceiling.flops or math.inf)
        if least > _product_margin(record, record.tape, count, bound) * seconds:
            did, most = units.count(count.flops / seconds, "FLOP/s"), units.count(count.flops / least, "FLOP/s")
            yield f"{phase} did {did} by the tape, this machine multiplied {most} at most"
        elif bounds.memory is not None and count.bytes > MARGIN * bounds.memory * seconds:
            did, most = units.count(count.bytes / seconds, "B/s"), units.count(bounds.memory, "B/s")
            yield f"{phase} moved {did} by the tape, this machine copied {most} at most"


def _compiled_step_above(tape: Tape, seconds: float, bounds: Roofs, ceiling: Ceiling) -> Iterator[str]:
    """Compares the products of a whole compiled step.

    Bytes, launches and the phase of a fused kernel are unknown, but no compiler does without products.
    """
    least = bounds.product_seconds(tape.by_path.items())
    if least is None:
        least = tape.flops / (ceiling.flops or math.inf)
    if least > MARGIN * seconds:
        did, most = (units.count(tape.flops / value, "FLOP/s") for value in (seconds, least))
        yield (
            f"the compiled step did {did} by the tape, this machine multiplied {most} at most: "
            "the compiler left work out"
        )


def _product_margin(record: Record, tape: Tape, count: PhaseCount, bound: float | None) -> float:
    """Returns the factor by which the products of a phase may exceed the measured peak."""
    operators = [operator for operator in tape.operators if operator.phase == count.phase]
    if record.case.device == "cpu":
        products = {operator.operator for operator in operators if operator.flops}
        plain = bool(products) and products <= _PLAIN and {path for path, _ in count.by_path} == {"fp32"}
        return PLAIN_MARGIN if bound is not None and plain else MARGIN
    convolves = any(_CONVOLUTION in operator.operator for operator in operators)
    return MARGIN if bound is None or convolves else COUNTED_MARGIN


def _check_fallback(record: Record, reference: Record | None) -> Iterator[Labelled]:
    """Yields a label if the products of a case ran in a precision other than the declared one.

    Suites without products are exempt, because nobody knows what a precision changes in them.
    """
    reason = _products_fell_back(record) or _describe_fp64(record, reference)
    if not reason and reference is not None and record.products is not None and record.products.low:
        equal = _equal_errors(record, reference)
        reason = f"{', '.join(equal)} exactly {reference.case.mode}'s" if equal else ""
    if reason:
        yield Labelled(Label.FALLBACK, reason, hard=True)
    elif doubt := _too_small_errors(record) or _unseen_products(record, reference):
        yield Labelled(Label.FALLBACK, doubt)


def _unseen_products(record: Record, reference: Record | None) -> str:
    """Names operators without a formula that may multiply in place of the reference's products, if no operand in the
    case's formats was seen; else ''."""
    products, tape = record.products, record.tape
    if products is None or products.low is not False or tape is None:
        return ""
    unknown = dict.fromkeys(operator.operator for operator in tape.operators if operator.flops is None)
    if not unknown or reference is None or reference.tape is None or not reference.tape.flops:
        return ""
    return (
        f"no product of {record.case.mode}'s formats was seen: it calls {', '.join(unknown)}, of which nobody knows "
        "what they multiply"
    )


def _too_small_errors(record: Record) -> str:
    """Describes an error() that is too small for products in the case's formats; else ''.

    This is only a doubt: error() may compare with values rounded earlier, and a suite may use values on the grid. A
    loss is a mean of many numbers, which may be right by chance, but not to the last bit.
    """
    errors = {m.metric: max(m.samples) for m in record.measurements if m.metric.endswith("_error") and m.samples}
    has_known_values = record.coverage is None and VALUES.of(dict(record.case.params)) in _ROUNDED_VALUES
    if not errors or not has_known_values or record.products is None or not record.products.low:
        return ""
    rounding = _rounding_error((record.case.precision, *dict(record.case.precision_map).values()))
    telling = [error for metric, error in errors.items() if metric != LOSS_ERROR]
    is_plausible = max(telling, default=rounding) >= rounding / _FAR_BELOW
    if not rounding or (max(errors.values()) > 0 and is_plausible):
        return ""
    words = ", ".join(f"{metric} {units.relative_error(error)}" for metric, error in errors.items())
    rounds = f"{record.case.mode} rounds each value by about {units.relative_error(rounding)}"
    return f"its error() says {words}: too little, for {rounds}"


def _rounding_error(names: Iterable[str]) -> float:
    """Returns by how much the finest of these precisions rounds values; 0 if one of them is unknown."""
    most_bits = 0
    for name in names:
        formats = [FORMATS[name]] if name in FORMATS else [treatment.fmt for treatment in _treatments(name)]
        if not formats:
            return 0.0
        most_bits = max(most_bits, *(number_format.mantissa_bits for number_format in formats))
    return _ROUNDING_ERROR * 2.0**-most_bits


def _products_fell_back(record: Record) -> str:
    """Describes products that did not run in the case's precision; else ''."""
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
    kernel = foreign_kernel(products.kernels, bits) if products.kernels else ""
    return f"its products ran in the kernel {kernel}" if kernel else ""


def _describe_fp64(record: Record, reference: Record | None) -> str:
    """Describes products in fp64, which make any precision look fast; else ''. Models and callables may have them."""
    may_have_them = record.case.workload == BENCH or record.case.precision == UNTOUCHED
    if may_have_them or (reference is not None and reference.case.precision == UNTOUCHED):
        return ""
    if record.tape is None:
        return ""
    flops = record.tape.by_path.get("fp64", 0)
    if flops <= _DIFFERENT * record.tape.flops:
        return ""
    return f"{units.count(flops, 'FLOP')} of its {units.count(record.tape.flops, 'FLOP')} a step are in fp64"


def _treatments(precision: str) -> Sequence[Treatment]:
    try:
        recipe = getattr(precisions.get(precision), "recipe", None)
    except UsageError:
        return ()
    return recipe.treatments if isinstance(recipe, Recipe) else ()


def _equal_errors(record: Record, reference: Record) -> list[str]:
    """Returns the errors that are equal to the last bit, if all are and one is not 0."""
    errors, base = _errors_of(record), _errors_of(reference)
    return list(errors) if errors == base and any(map(any, errors.values())) else []


def _errors_of(record: Record) -> dict[str, tuple[float, ...]]:
    return {error.metric: error.samples for error in record.measurements if error.metric not in PEAKS}


# The order of checks; handicaps of the reference come last.
CLAIM_CHECKS: tuple[Callable[[Record, Record | None], Iterator[Labelled]], ...] = (
    _check_no_work,
    _check_ceiling,
    _check_work,
    _check_fallback,
)
