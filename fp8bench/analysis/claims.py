"""Labels cases whose claims cannot be true, such as more FLOP/s than the machine can reach.

The checks do not trust the workload's code. They compare its steps with their results, its declared work with the
recorded operators (the tape), its throughput with the machine's peak, and its precision with the products that ran.
They also check whether the reference has a handicap: whether it is slower than necessary or has different inputs.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence

from fp8bench import units
from fp8bench.analysis import verdicts
from fp8bench.analysis.handicaps import yield_handicap_labels
from fp8bench.analysis.labels import LabelWithReason
from fp8bench.analysis.roofline import DevicePeaks, upper_bounds_of
from fp8bench.analysis.tapes import sum_product_work
from fp8bench.errors import UsageError
from fp8bench.formats.grids import FORMATS
from fp8bench.formats.hardware import find_wider_kernel
from fp8bench.formats.recipes import Recipe, Treatment
from fp8bench.model import Ceiling, Label, Record, Tape
from fp8bench.model.run import BENCH
from fp8bench.model.specs import COUNTERS_TABLE, LOSS_ERROR, PEAK_MEMORIES, find_metric_spec
from fp8bench.model.step import PhaseCount
from fp8bench.model.words import UNTOUCHED
from fp8bench.protocols.axes import VALUES
from fp8bench.registry import precisions, workloads

# A claim may exceed the measured peak of the machine by this factor, because Winograd's algorithm needs 2.25 times
# fewer FLOPs than are counted. The highest claim of fp8bench's suites is 1.1 times the best product: a 3x3
# convolution in fp32 on one core of an AMD EPYC (Zen 5). For bytes, the highest claim is 0.4 times the best copy.
# Suites may count a 16-bit tensor as if it had four bytes per element.
CLAIM_MARGIN = 2.5
# The number of bits per element that is assumed for an unknown precision. No kernel multiplies more bits.
_UNKNOWN_FORMAT_BITS = 64
# If the declared FLOPs exceed the recorded ones by the first factor, the step left work out. If the recorded FLOPs
# exceed the declared ones by the second factor, the recording shows a different step. Recomputed activations explain
# a factor of 4/3. Attention that computes a square of scores and then masks half of it explains a factor of 2.
_DECLARED_FLOPS_MARGIN = 1.05
_RECORDED_FLOPS_MARGIN = 4.0
# Two steps do different work if their FLOPs differ by more than this share.
_FLOPS_TOLERANCE = 0.05
# The limit of declared bytes divided by recorded bytes. Suites count bytes in the input dtype: with fp32 inputs, they
# declare four bytes where an FP8 case reads one.
_DECLARED_BYTES_MARGIN = 4.0
# On a GPU, recorded products may exceed the measured peak by this factor, because the search for the peak may have
# missed the best shape. Convolutions are exempt, because some algorithms need fewer FLOPs than are counted.
GPU_PRODUCT_MARGIN = 1.25
_CONVOLUTION_NAME_PART = "convolution"
# On a CPU, fp32 matrix products may exceed the measured peak by this factor. It is larger than on a GPU, because the
# clock varies more. The fastest product of six suites reached the peak. Products in bf16 are exempt: on CPUs without
# bf16 support, a vector-matrix product reached 2.6 times the peak. Attention is exempt, because it may skip masked
# elements.
CPU_FP32_CLAIM_MARGIN = 1.5
_MATRIX_PRODUCTS = frozenset({"mm", "addmm", "bmm", "baddbmm"})
# A format with m mantissa bits is assumed to have a relative rounding error of at least this number divided by 2^m.
# With normal and uniform values, the errors of fp8bench's suites are at least 1.4 times as large. A format may
# represent integers exactly, so a case is checked only if its `values` axis has one of _CHECKED_VALUE_DISTRIBUTIONS.
_ROUNDING_ERROR = 0.19
_CHECKED_VALUE_DISTRIBUTIONS = frozenset({"normal", "uniform"})
# The errors of a case are doubtful if the largest is smaller than the rounding error divided by this number.
_ROUNDING_ERROR_DIVISOR = 20


def label_false_claims(record: Record, reference: Record | None, threads: int = 1) -> Iterator[LabelWithReason]:
    """Yields labels for a timed case whose claims are false. A hard label also removes its verdict. `reference` is
    None for the reference itself, and for cases without a reference.
    """
    if reference is record:
        reference = None
    yield from _check_for_missing_work(record)
    yield from _check_ceiling(record)
    yield from _label_work_mismatch(record, reference)
    yield from _check_fallback(record, reference)
    if reference is not None:
        yield from yield_handicap_labels(record, reference, threads)


def _check_for_missing_work(record: Record) -> Iterator[LabelWithReason]:
    # A step does no work if its results do not change with its inputs (`effect`). If it is unknown whether they change,
    # it does none if no operator was recorded (an empty tape).
    if record.effect is not None and record.effect.changes is False:
        yield LabelWithReason(Label.NO_WORK, record.effect.why, hard=True)
    elif record.tape == Tape() and record.work.flops and (record.effect is None or not record.effect.changes):
        declared_flops = units.count(record.work.flops, "FLOP")
        yield LabelWithReason(
            Label.NO_WORK, f"its steps call no operator of torch, but the suite declares {declared_flops}", hard=True
        )


def _label_work_mismatch(record: Record, reference: Record | None) -> Iterator[LabelWithReason]:
    """Yields one label at most, for the gravest mismatch between the work that the suite declares, the recorded work,
    and the work of the reference.
    """
    work_mismatches = [*_compare_declared_work(record)]
    if reference is not None:
        work_mismatches += [*_compare_with_reference_work(record, reference), *_find_weights_cast_early(record)]
    yield from sorted(work_mismatches, key=lambda mismatch: not mismatch.hard)[:1]


def _compare_declared_work(record: Record) -> Iterator[LabelWithReason]:
    """Compares the declared work with the recorded work.

    The recording (the tape) does not contain the work of operators without a formula, the work of operators from
    outside torch, and the bytes sent between ranks. Its field `unwritten` counts tensors that only an operator from
    outside torch can have written.
    """
    tape, declared_work = record.tape, record.work
    if tape is None or not tape.operators:
        return
    declared_text, recorded_text = units.count(declared_work.flops, "FLOP"), units.count(tape.flops, "FLOP")
    # An incomplete tape lacks FLOPs, so only a complete one can show that the step does too little.
    if tape.complete and declared_work.flops > _DECLARED_FLOPS_MARGIN * tape.flops:
        yield LabelWithReason(
            Label.WORK_MISMATCH,
            f"the suite declares {declared_text} a step, its operators do {recorded_text}",
            hard=True,
        )
    elif record.case.ranks < 2 and tape.unwritten == 0 and declared_work.bytes > _DECLARED_BYTES_MARGIN * tape.bytes:
        declared_text, recorded_text = units.size(int(declared_work.bytes)), units.size(tape.bytes)
        yield LabelWithReason(
            Label.WORK_MISMATCH,
            f"the suite declares {declared_text} a step, its operators move {recorded_text}",
            hard=True,
        )
    elif tape.complete and (difference := _describe_untimed_work(record, tape)):
        yield LabelWithReason(Label.WORK_MISMATCH, difference, hard=True)
    elif declared_work.flops and tape.flops > _RECORDED_FLOPS_MARGIN * declared_work.flops:
        yield LabelWithReason(
            Label.WORK_MISMATCH, f"the suite declares {declared_text} a step, its operators do {recorded_text}"
        )


def _describe_untimed_work(record: Record, tape: Tape) -> str:
    """Describes how the products of timed steps differ from those of the untimed, recorded step, or returns ''. Timed
    steps are represented by late steps, which run after the timing in a timed state.
    """
    if record.late_flops is not None and _flops_differ(record.late_flops, tape.flops):
        timed_text, untimed_text = (units.count(flops, "FLOP") for flops in (record.late_flops, tape.flops))
        return f"a timed step does {timed_text}, an untimed step {untimed_text}"
    late_steps = record.late
    if late_steps is None or late_steps.by_path is None or late_steps.varies:
        return ""
    for dtype, flops in late_steps.by_path:
        untimed_flops = tape.by_path.get(dtype, 0)
        if flops - untimed_flops > _FLOPS_TOLERANCE * tape.flops:
            timed_text, untimed_text = (units.count(count, "FLOP") for count in (flops, untimed_flops))
            return f"a timed step does {timed_text} in {dtype}, an untimed step {untimed_text}"
    return ""


def _flops_differ(flops: float, base: float) -> bool:
    return abs(flops - base) > _FLOPS_TOLERANCE * max(flops, base)


def _compare_with_reference_work(record: Record, reference: Record) -> Iterator[LabelWithReason]:
    """Compares the recorded products of the case with those of its reference. The declared work is ignored.

    Callables of the user are exempt, because they may compute the same result with different products.
    """
    tape, base_tape = record.tape, reference.tape
    if record.case.workload == BENCH or tape is None or base_tape is None:
        return
    if not (tape.operators or base_tape.operators) or not (tape.complete and base_tape.complete):
        return
    # Useful FLOPs exclude padding and recomputation, which a comparison with the reference's recorded step (its tape)
    # shows.
    work, base_useful_flops = sum_product_work(tape, base_tape), sum_product_work(base_tape).useful_flops
    flops_differ, name = _flops_differ(work.useful_flops, base_useful_flops), record.case.workload
    if not flops_differ and (difference := _describe_varying_work(record, reference)):
        yield LabelWithReason(Label.WORK_MISMATCH, difference)
        return
    # In some suites the values of tensors decide which operations a step runs. There, case and reference must do
    # exactly the same work, because slightly less work would take slightly less time.
    work_depends_on_values = name in workloads.names(hidden=True) and workloads.get(name).own_paths
    is_same_work = (work.useful_flops, work.padding_flops) == (base_useful_flops, 0)
    if not flops_differ and (is_same_work or not work_depends_on_values):
        return
    overhead_text = ""
    for metric, flops in work.overhead.items():
        overhead_text += f", {units.count(flops, 'FLOP')} of {metric.removesuffix('_flops')}"
    flops_text, base_flops_text = units.count(work.useful_flops, "FLOP"), units.count(base_useful_flops, "FLOP")
    reason = f"its products do {flops_text} a step{overhead_text}, {reference.case.mode}'s do {base_flops_text}"
    yield LabelWithReason(Label.WORK_MISMATCH, reason, hard=flops_differ)


def _find_weights_cast_early(record: Record) -> Iterator[LabelWithReason]:
    """Yields a label for a case that cast its weights during preparation, so that the timed steps lack this cast."""
    weight_count = record.products.cast_before if record.products is not None else 0
    if weight_count:
        weights_text = f"{weight_count} weights that were" if weight_count > 1 else "a weight that was"
        yield LabelWithReason(
            Label.WORK_MISMATCH,
            f"its products read {weights_text} cast to {record.case.mode} during preparation, so no step includes this "
            "cast: cast in the step, or let memory_roles name the stored weights MemoryRole.LOW_WEIGHTS",
        )


def _describe_varying_work(record: Record, reference: Record) -> str:
    """Describes a case whose mean FLOPs per step differ from the reference's, if the products of either vary from step
    to step. Returns '' otherwise.
    """
    late_steps, base_late_steps = record.late, reference.late
    if (
        late_steps is None
        or base_late_steps is None
        or late_steps.flops is None
        or base_late_steps.flops is None
        or not (late_steps.varies or base_late_steps.varies)
    ):
        return ""
    if not _flops_differ(late_steps.flops, base_late_steps.flops):
        return ""
    flops_text, base_flops_text = (units.count(flops, "FLOP") for flops in (late_steps.flops, base_late_steps.flops))
    return (
        f"its steps do not all do the same products: {flops_text} on average, {reference.case.mode}'s {base_flops_text}"
    )


def _check_ceiling(record: Record) -> Iterator[LabelWithReason]:
    """Yields a label if the recorded work, or else the declared work, exceeds the peak of the machine."""
    if record.ceiling is None or record.timing is None or not (seconds := verdicts.best_seconds(record.timing)):
        return
    if reason := next(_describe_phases_above_peak(record, record.ceiling), None):
        yield LabelWithReason(Label.ABOVE_CEILING, reason, hard=True)
        return
    for count, ceiling_rate, unit, verb in (
        (record.work.flops, record.ceiling.flops, "FLOP/s", "multiplied"),
        (record.work.bytes, record.ceiling.bytes, "B/s", "copied"),
    ):
        if ceiling_rate is not None and count / seconds > CLAIM_MARGIN * ceiling_rate:
            claimed_text, peak_text = units.count(count / seconds, unit), units.count(ceiling_rate, unit)
            yield LabelWithReason(
                Label.ABOVE_CEILING, f"claims {claimed_text}, but this machine {verb} {peak_text} at most", hard=True
            )
            return


def _describe_phases_above_peak(record: Record, ceiling: Ceiling) -> Iterator[str]:
    """Describes phases that were too fast to do their recorded work, even at the peak rates of the device."""
    # If timed steps do different work, the recording of one untimed step does not describe them all.
    if record.tape is None or record.timing is None or (record.late is not None and record.late.varies):
        return
    upper_bounds = upper_bounds_of(ceiling)
    if record.tape.fused:
        yield from _describe_compiled_step_above_peak(
            record.tape, verdicts.best_seconds(record.timing), upper_bounds, ceiling
        )
        return
    for phase, seconds in verdicts.compute_best_phase_seconds(record.timing):
        count = record.tape.of(phase)
        if count is None or not seconds:
            continue
        product_seconds = upper_bounds.product_seconds(count.by_path)
        # If the peak of a kind of product is unknown, use the highest product rate that the case can reach.
        min_seconds = product_seconds if product_seconds is not None else count.flops / (ceiling.flops or math.inf)
        if min_seconds > _choose_product_peak_margin(record, record.tape, count, product_seconds) * seconds:
            rate_text = units.count(count.flops / seconds, "FLOP/s")
            peak_text = units.count(count.flops / min_seconds, "FLOP/s")
            yield f"{phase} multiplied {rate_text} as recorded, but this machine reached {peak_text} at most"
        elif upper_bounds.memory is not None and count.bytes > CLAIM_MARGIN * upper_bounds.memory * seconds:
            rate_text, peak_text = units.count(count.bytes / seconds, "B/s"), units.count(upper_bounds.memory, "B/s")
            yield f"{phase} moved {rate_text} as recorded, but this machine copied {peak_text} at most"


def _describe_compiled_step_above_peak(
    tape: Tape, seconds: float, bounds: DevicePeaks, ceiling: Ceiling
) -> Iterator[str]:
    """Describes a compiled step whose recorded products exceed the peak of the machine.

    The bytes, launches and phases of fused kernels are unknown, but a compiler cannot avoid the products.
    """
    min_seconds = bounds.product_seconds(tape.by_path.items())
    if min_seconds is None:
        min_seconds = tape.flops / (ceiling.flops or math.inf)
    if min_seconds > CLAIM_MARGIN * seconds:
        rate_text, peak_text = (units.count(tape.flops / value, "FLOP/s") for value in (seconds, min_seconds))
        yield (
            f"the compiled step multiplied {rate_text} as recorded, but this machine reached {peak_text} at most: "
            "the compiler left work out"
        )


def _choose_product_peak_margin(record: Record, tape: Tape, count: PhaseCount, product_seconds: float | None) -> float:
    """Returns the factor by which the products of a phase may exceed the measured peak before the case is labelled."""
    operators = [operator for operator in tape.operators if operator.phase == count.phase]
    if record.case.device == "cpu":
        products = {operator.operator for operator in operators if operator.flops}
        is_fp32_matrix_product = (
            bool(products) and products <= _MATRIX_PRODUCTS and {dtype for dtype, _ in count.by_path} == {"fp32"}
        )
        return CPU_FP32_CLAIM_MARGIN if product_seconds is not None and is_fp32_matrix_product else CLAIM_MARGIN
    has_convolution = any(_CONVOLUTION_NAME_PART in operator.operator for operator in operators)
    return CLAIM_MARGIN if product_seconds is None or has_convolution else GPU_PRODUCT_MARGIN


def _check_fallback(record: Record, reference: Record | None) -> Iterator[LabelWithReason]:
    """Yields a label if the products of a case ran in a precision that the case does not declare.

    Suites without products are exempt, because it is unknown what a precision changes in them.
    """
    reason = _describe_product_fallback(record) or _describe_fp64_products(record, reference)
    # `products.low` is True if at least one product had an operand in the case's formats. Then equal errors are
    # suspicious.
    if not reason and reference is not None and record.products is not None and record.products.low:
        equal_errors = _list_equal_errors(record, reference)
        reason = f"{', '.join(equal_errors)} equal to {reference.case.mode}'s to the last bit" if equal_errors else ""
    if reason:
        yield LabelWithReason(Label.FALLBACK, reason, hard=True)
    elif doubt := _describe_too_small_errors(record) or _describe_unseen_products(record, reference):
        yield LabelWithReason(Label.FALLBACK, doubt)


def _describe_unseen_products(record: Record, reference: Record | None) -> str:
    """Names the operators without a FLOP formula that may have computed the products of a case, if fp8bench saw no
    product with operands in the case's formats. Returns '' otherwise.
    """
    products, tape = record.products, record.tape
    if products is None or products.low is not False or tape is None:
        return ""
    operators_without_flops = dict.fromkeys(operator.operator for operator in tape.operators if operator.flops is None)
    if not operators_without_flops or reference is None or reference.tape is None or not reference.tape.flops:
        return ""
    return (
        f"no product of {record.case.mode}'s formats was seen: it calls {', '.join(operators_without_flops)}, and "
        "fp8bench does not know what these operators multiply"
    )


def _describe_too_small_errors(record: Record) -> str:
    """Describes errors from the suite's error() that are too small for products in the case's formats. Returns '' if
    they are large enough.

    Small errors only cast doubt on the case: error() may compare with rounded values, or with values that the format
    represents exactly. A loss is a mean of many numbers, so its error may be small by chance, but not 0.
    """
    error_by_metric = {
        m.metric: max(m.samples) for m in record.measurements if m.metric.endswith("_error") and m.samples
    }
    # Only a case with a user's model has a `coverage`. The distribution of such a model's values is unknown.
    has_known_operand_values = (
        record.coverage is None and VALUES.of(dict(record.case.params)) in _CHECKED_VALUE_DISTRIBUTIONS
    )
    if not error_by_metric or not has_known_operand_values or record.products is None or not record.products.low:
        return ""
    rounding_error = _estimate_rounding_error((record.case.precision, *dict(record.case.precision_map).values()))
    errors_without_loss = [error for metric, error in error_by_metric.items() if metric != LOSS_ERROR]
    # If only a loss was compared, its error is plausible unless it is 0.
    is_error_plausible = not errors_without_loss or max(errors_without_loss) >= rounding_error / _ROUNDING_ERROR_DIVISOR
    if not rounding_error or (max(error_by_metric.values()) > 0 and is_error_plausible):
        return ""
    errors_text = ", ".join(f"{metric} {units.relative_error(error)}" for metric, error in error_by_metric.items())
    rounding_text = f"{record.case.mode} rounds each value by about {units.relative_error(rounding_error)}"
    return f"its error() reports {errors_text}, which is too little: {rounding_text}"


def _estimate_rounding_error(names: Iterable[str]) -> float:
    """Returns the rounding error of the finest of these precisions. Returns 0 if any of them is unknown."""
    max_mantissa_bits = 0
    for name in names:
        formats = [FORMATS[name]] if name in FORMATS else [treatment.fmt for treatment in _list_cast_treatments(name)]
        if not formats:
            return 0.0
        max_mantissa_bits = max(max_mantissa_bits, *(number_format.mantissa_bits for number_format in formats))
    return _ROUNDING_ERROR * 2.0**-max_mantissa_bits


def _describe_product_fallback(record: Record) -> str:
    """Describes products that did not run in the case's precision. Returns '' if all did.

    In the record's `products`, `wide` is True if native products got values of the case's formats in wider dtypes.
    `looks_like` names the precision that explains the result of a product, if this is not the case's precision.
    """
    products, mode = record.products, record.case.mode
    if products is None:
        return ""
    product_operands_text = (
        f"{products.count} product{'s' * (products.count > 1)}, of {' and '.join(products.operands)}"
    )
    if products.count and products.low is False:
        return f"{product_operands_text}: none has an operand of {mode}'s formats"
    if products.wide:
        return f"{product_operands_text}: operands with values of {mode}'s formats, but not as its codes"
    if products.looks_like:
        return f"the numbers of a product are those of {products.looks_like}"
    format_bits = max(
        (treatment.fmt.bits for treatment in _list_cast_treatments(record.case.precision)), default=_UNKNOWN_FORMAT_BITS
    )
    kernel = find_wider_kernel(products.kernels, format_bits) if products.kernels else ""
    return f"its products ran in the kernel {kernel}" if kernel else ""


def _describe_fp64_products(record: Record, reference: Record | None) -> str:
    """Describes products in fp64, because a slow fp64 reference makes any precision look fast. Returns '' if there
    are few.

    The user's callables (BENCH) and unchanged models (UNTOUCHED) may have fp64 products.
    """
    may_use_fp64 = record.case.workload == BENCH or record.case.precision == UNTOUCHED
    if may_use_fp64 or (reference is not None and reference.case.precision == UNTOUCHED):
        return ""
    if record.tape is None:
        return ""
    fp64_flops = record.tape.by_path.get("fp64", 0)
    if fp64_flops <= _FLOPS_TOLERANCE * record.tape.flops:
        return ""
    return f"{units.count(fp64_flops, 'FLOP')} of its {units.count(record.tape.flops, 'FLOP')} a step are in fp64"


def _list_cast_treatments(precision: str) -> Sequence[Treatment]:
    try:
        recipe = getattr(precisions.get(precision), "recipe", None)
    except UsageError:
        return ()
    return recipe.treatments if isinstance(recipe, Recipe) else ()


def _list_equal_errors(record: Record, reference: Record) -> list[str]:
    """Returns the names of the error metrics if every error equals the reference's to the last bit and at least one
    error is not 0.
    """
    errors, base_errors = _collect_errors(record), _collect_errors(reference)
    return list(errors) if errors == base_errors and any(map(any, errors.values())) else []


def _collect_errors(record: Record) -> dict[str, tuple[float, ...]]:
    """Returns the samples of a case's errors by metric. Measurements are errors, except peak memories and counters."""
    samples_by_metric = {}
    for measurement in record.measurements:
        metric = measurement.metric
        if metric not in PEAK_MEMORIES and find_metric_spec(metric).table != COUNTERS_TABLE:
            samples_by_metric[metric] = measurement.samples
    return samples_by_metric
