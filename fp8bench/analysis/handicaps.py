"""Labels a case whose reference has a handicap: it is slower than necessary, or has different inputs.

A reference with a handicap makes any precision look fast. Examples are products far below the device's peak, more
numbers moved or copied, wider or smaller products, subnormal numbers, sleeping, and time outside torch.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from fp8bench import units
from fp8bench.analysis import verdicts
from fp8bench.analysis.labels import LabelWithReason, is_contended
from fp8bench.analysis.roofline import product_kind_of, upper_bounds_of
from fp8bench.analysis.tapes import get_operand_bits, sum_product_work
from fp8bench.errors import UsageError
from fp8bench.model import GivenTensors, Label, Level, Phase, Record, SlotSample, Tape, Timing
from fp8bench.model.run import BENCH
from fp8bench.model.words import UNTOUCHED
from fp8bench.registry import precisions

# The root mean squares of the inputs of case and reference may differ by this share. Rounding to four bits changes a
# root mean square by at most 2%.
_RMS_TOLERANCE = 0.1
_SUBNORMAL_SHARE = 0.01
# Inputs count as different if the sums of a tensor in case and reference differ by more than _MIN_SUM_DISTANCE times
# the root of the tensor's sum of squares. Six of seven unrelated pairs do. Rounding to four bits causes only 0.1. The
# share _SHARE_OF_SUM_BY_SHIFT of the sum is ignored, because all values may be shifted.
_MIN_SUM_DISTANCE, _SHARE_OF_SUM_BY_SHIFT = 0.25, 0.02
# A reference's products are slow if they reach less than _LOW_SHARE_OF_CEILING, and one would take at least
# _LARGE_PRODUCT_SECONDS at the ceiling. If the case's products reach _NEARER_RATIO times as large a share of their
# ceiling, _MIN_PRODUCT_SECONDS are enough. For comparison: on an idle core, fp8bench's fp32 products reach at least
# 0.65 of the ceiling, and convolutions 0.2.
_LOW_SHARE_OF_CEILING, _LARGE_PRODUCT_SECONDS, _MIN_PRODUCT_SECONDS, _NEARER_RATIO = 1 / 3, 1e-3, 1e-4, 2.0
_MIN_MOVED_NUMBERS_RATIO = 2.0
_COPY_OPERATORS = frozenset({"clone", "copy_", "_to_copy"})
_MIN_EXTRA_COPIED_SHARE = 0.1
_MIN_EXTRA_WIDE_FLOAT_SHARE = 0.05
_MIN_EXTRA_SLEEP_SHARE = _MIN_EXTRA_THREAD_TIME_SHARE = 0.1
# On a busy machine, threads may take up to this many times as long for the same work.
_BUSY_MACHINE_RATIO = 3.0
# A reference is suspect if it gives up its core more often than the case, by at least this number per step.
_MIN_EXTRA_WAITS_PER_STEP = 0.5
# A reference is suspect if it spends more time outside torch's operators than the case. The first number is the
# difference of the shares of time, the second the difference in seconds.
_MIN_EXTRA_SHARE_OUTSIDE, _MIN_EXTRA_SECONDS_OUTSIDE = 0.15, 50e-6
# A reference is suspect if it spends more time in an operator than the case and calls it more often. The extra time
# must exceed this share of the reference's time in operators. Its calls, plus the numbers that they move, must exceed
# this many times the case's.
_MIN_EXTRA_OPERATOR_SHARE, _MIN_CALLS_RATIO = 0.1, 1.5
_MIN_PRODUCT_CALLS_RATIO = 3


def yield_handicap_labels(record: Record, reference: Record, threads: int) -> Iterator[LabelWithReason]:
    """Yields the labels that a case gets if its reference has different inputs or is slower than necessary.

    Labels for inputs of different magnitude and for a reference that sleeps are hard. If the user's callables are
    measured, only inputs are compared.
    """
    yield from _label_different_inputs(record, reference)
    if Level.EMULATED in (record.support.level, reference.support.level) or not record.paired:
        return
    if record.case.workload == BENCH:
        return
    # Time without a core is meaningful only on a CPU, and only without ranks, which wait for each other.
    has_core_to_itself = record.case.device == "cpu" and record.case.ranks < 2
    sleep_reasons = list(_compare_sleep_time(record, reference)) if has_core_to_itself else []
    reasons = [*_compare_shares_of_ceiling(record, reference), *sleep_reasons, *_compare_late_steps(record, reference)]
    if has_core_to_itself and threads == 1:
        reasons += _compare_threads(record, reference)
        if not sleep_reasons:
            reasons += _compare_core_waits(record, reference)
    if record.tape is not None and reference.tape is not None:
        reasons += _compare_moved_numbers(record.tape, reference.tape)
        reasons += _compare_dtype_widths(record, record.tape, reference, reference.tape)
        reasons += _compare_product_call_counts(record.tape, reference.tape)
        reasons += _compare_layouts(record, reference, reference.tape)
    if reasons:
        yield LabelWithReason(Label.HANDICAP, f"{reference.case.mode} {'; '.join(reasons)}", hard=bool(sleep_reasons))


def _describe_share_excess(reference_share: float, share: float, min_difference: float, words: str) -> Iterator[str]:
    """Yields the format string `words` with both shares filled in, if the reference's share exceeds the case's by more
    than `min_difference`.
    """
    if reference_share - share > min_difference:
        yield words.format(units.percent(reference_share, 0), units.percent(share, 0))


def _label_different_inputs(record: Record, reference: Record) -> Iterator[LabelWithReason]:
    """Yields a label if input tensors of the case and the reference differ. Only shapes of which both have equally many
    tensors are compared.
    """
    if record.products is None or reference.products is None:
        return
    tensors_by_shape = {case_tensors.shape: case_tensors for case_tensors in record.products.given}
    mode, scale = reference.case.mode, _find_loss_scale(record) / _find_loss_scale(reference)
    squared_distances = []
    reasons = []
    for base_tensors in reference.products.given:
        case_tensors = tensors_by_shape.get(base_tensors.shape)
        if case_tensors is not None and case_tensors.tensors == base_tensors.tensors:
            case_tensors = _undo_loss_scale(case_tensors, base_tensors, scale)
            squared_distances.append(_compute_squared_sum_distance(case_tensors, base_tensors))
            reasons.append(_describe_magnitude_gap(case_tensors, base_tensors, mode))
    if reason := next(filter(None, reasons), ""):
        yield LabelWithReason(Label.OTHER_INPUTS, reason, hard=True)
    elif squared_distances and math.sqrt(sum(squared_distances) / len(squared_distances)) > _MIN_SUM_DISTANCE:
        yield LabelWithReason(Label.OTHER_INPUTS, f"inputs have the magnitude of {mode}'s, but different numbers")


def _find_loss_scale(record: Record) -> float:
    """Returns the loss scale of a case's precision, or 1 if the precision is not registered."""
    try:
        return precisions.get(record.case.precision).loss_scale or 1.0
    except UsageError:
        return 1.0


def _undo_loss_scale(case_tensors: GivenTensors, reference_tensors: GivenTensors, scale: float) -> GivenTensors:
    """Returns the case's tensors, divided by fp16's loss scale of gradients if that makes their magnitude more like
    that of the reference's tensors.
    """
    unscaled_tensors = replace(case_tensors, total=case_tensors.total / scale, squares=case_tensors.squares / scale**2)
    return min(case_tensors, unscaled_tensors, key=lambda tensors: abs(tensors.rms - reference_tensors.rms))


def _describe_magnitude_gap(case_tensors: GivenTensors, reference_tensors: GivenTensors, mode: str) -> str:
    """Describes inputs that differ in magnitude or in their share of subnormal numbers. Returns '' if they do not."""
    shape = _show_shape(case_tensors)
    subnormal_share, base_subnormal_share = (
        tensors.subnormals / tensors.elements for tensors in (case_tensors, reference_tensors)
    )
    if abs(base_subnormal_share - subnormal_share) > _SUBNORMAL_SHARE:
        reference_text = f"{units.percent(base_subnormal_share, 0)} of {mode}'s numbers in {shape} are subnormal"
        return f"{reference_text}, this case has {units.percent(subnormal_share, 0)}"
    if abs(case_tensors.rms - reference_tensors.rms) > _RMS_TOLERANCE * max(case_tensors.rms, reference_tensors.rms):
        reference_text = f"the root mean square of {mode}'s {shape} is {reference_tensors.rms:.3g}"
        return f"{reference_text}, this case's {case_tensors.rms:.3g}"
    return ""


def _show_shape(tensors: GivenTensors) -> str:
    return " x ".join(map(str, tensors.shape))


def _compute_squared_sum_distance(case_tensors: GivenTensors, reference_tensors: GivenTensors) -> float:
    """Returns the squared difference of two tensors' sums, divided by the sum of squares. It is about 2 for unrelated
    numbers.
    """
    sum_distance = max(
        0.0, abs(case_tensors.total - reference_tensors.total) - _SHARE_OF_SUM_BY_SHIFT * abs(reference_tensors.total)
    )
    return sum_distance**2 / reference_tensors.squares if reference_tensors.squares else 0.0


def _compare_sleep_time(record: Record, reference: Record) -> Iterator[str]:
    """Compares the share of time in which the process slept: it neither ran nor waited for a core."""
    sleep_share = _compute_slot_sleep_share(record.timing)
    base_sleep_share = _compute_slot_sleep_share(reference.timing)
    if sleep_share is not None and base_sleep_share is not None:
        yield from _describe_share_excess(
            base_sleep_share,
            sleep_share,
            _MIN_EXTRA_SLEEP_SHARE,
            "sleeps for {} of its time, but this case only for {}",
        )


def _compute_slot_sleep_share(timing: Timing | None) -> float | None:
    """Returns the share of a slot in which the process slept, as the median over slots. Returns None if waiting for a
    core was not recorded.
    """
    slot_sleep_shares = []
    for slot in _list_slots(timing):
        if slot.waited_seconds is not None and slot.wall_seconds > 0:
            awake_seconds = slot.cpu_seconds + slot.waited_seconds + (slot.stolen_seconds or 0.0)
            slot_sleep_shares.append(1 - awake_seconds / slot.wall_seconds)
    return max(0.0, float(np.median(slot_sleep_shares))) if slot_sleep_shares else None


def _list_slots(timing: Timing | None) -> Sequence[SlotSample]:
    return timing.slots if timing is not None else ()


def _compare_threads(record: Record, reference: Record) -> Iterator[str]:
    """Compares the work of the process's threads other than the thread that runs the steps. This is only meaningful if
    torch has one thread.
    """
    work = _measure_other_thread_work(record.timing)
    base_work = _measure_other_thread_work(reference.timing)
    if work is None or base_work is None:
        return
    if _exceeds_base_thread_work(work, base_work) or _exceeds_base_thread_work(base_work, work):
        base_words, words = units.seconds(max(base_work.seconds, 0.0)), units.seconds(max(work.seconds, 0.0))
        yield f"has other threads that work for {base_words} a step, this case for {words}"


class _BackgroundThreadSeconds(NamedTuple):
    """CPU seconds per step of the threads that do not run the steps: in the median slot (`seconds`) and in the busiest
    slot (`max_seconds`). `step_seconds` is the wall-clock time of the median step.
    """

    seconds: float
    max_seconds: float
    step_seconds: float


def _exceeds_base_thread_work(work: _BackgroundThreadSeconds, base: _BackgroundThreadSeconds) -> bool:
    # On a busy machine, a harmless data loader may run between most slots of a case, where its time is not measured,
    # but not between all. So compare with the busiest slot.
    is_extra_time_large = work.seconds - base.seconds > _MIN_EXTRA_THREAD_TIME_SHARE * work.step_seconds
    return is_extra_time_large and work.seconds > _BUSY_MACHINE_RATIO * base.max_seconds


def _compare_core_waits(record: Record, reference: Record) -> Iterator[str]:
    """Compares the share of time without a core, if the reference gives up its core more often than the case. Uses the
    slot with the smallest share of each side, because other programs may have taken the core in other slots.
    """
    late_steps, base_late_steps = record.late, reference.late
    if (
        late_steps is not None
        and base_late_steps is not None
        and base_late_steps.waits - late_steps.waits > _MIN_EXTRA_WAITS_PER_STEP
    ):
        off_core_share = _find_min_share_off_core(record.timing)
        base_off_core_share = _find_min_share_off_core(reference.timing)
        yield from _describe_share_excess(
            base_off_core_share,
            off_core_share,
            _MIN_EXTRA_SLEEP_SHARE,
            "waits for at least {} of its time, but this case only for {}",
        )


def _find_min_share_off_core(timing: Timing | None) -> float:
    off_cpu_shares = [1 - slot.cpu_seconds / slot.wall_seconds for slot in _list_slots(timing) if slot.wall_seconds]
    return max(0.0, min(off_cpu_shares, default=0.0))


def _measure_other_thread_work(timing: Timing | None) -> _BackgroundThreadSeconds | None:
    """Returns the CPU seconds of threads that do not run the steps, or None if no thread's time was recorded."""
    recorded_slots = [slot for slot in _list_slots(timing) if slot.thread_seconds is not None]
    if not recorded_slots:
        return None
    other_thread_step_seconds = [
        (slot.cpu_seconds - (slot.thread_seconds or 0.0)) / len(slot.calls_ns) for slot in recorded_slots
    ]
    step_seconds = [slot.wall_seconds / len(slot.calls_ns) for slot in recorded_slots]
    return _BackgroundThreadSeconds(
        float(np.median(other_thread_step_seconds)), max(other_thread_step_seconds), float(np.median(step_seconds))
    )


def _find_min_thread_seconds(timing: Timing | None) -> float:
    """Returns the fewest CPU seconds per step, in any slot (a timed turn of the case), of the thread that runs the
    steps. Returns 0 if they were not recorded.
    """
    recorded_slots = [slot for slot in _list_slots(timing) if slot.thread_seconds]
    return min(((slot.thread_seconds or 0.0) / len(slot.calls_ns) for slot in recorded_slots), default=0.0)


def _compare_late_steps(record: Record, reference: Record) -> Iterator[str]:
    """Compares late steps (untimed steps after the rounds, with recorded operators): their subnormal results, torch's
    arithmetic switches, and the time outside and inside operators.
    """
    late_steps, base_late_steps = record.late, reference.late
    if late_steps is None or base_late_steps is None:
        return
    # 1. Compare the share of subnormal results, and torch's settings for arithmetic.
    if max(late_steps.subnormal, base_late_steps.subnormal) > _SUBNORMAL_SHARE:
        base_share, share = units.percent(base_late_steps.subnormal, 0), units.percent(late_steps.subnormal, 0)
        yield f"has {base_share} subnormal numbers in its results, this case {share}: processors compute them slowly"
    if late_steps.switches != base_late_steps.switches:
        base_words, words = (", ".join(steps.switches) or "no switch" for steps in (base_late_steps, late_steps))
        yield f"sets {base_words} within its steps, this case {words}"
    # 2. Compare the time outside torch's operators.
    if not late_steps.in_operators or not base_late_steps.in_operators:
        return
    step_seconds, base_step_seconds = (
        _find_min_thread_seconds(record.timing),
        _find_min_thread_seconds(reference.timing),
    )
    seconds_outside_operators = max(0.0, step_seconds - late_steps.in_operators)
    base_seconds_outside_operators = base_step_seconds - base_late_steps.in_operators
    if (
        step_seconds > 0
        and base_step_seconds > 0
        and base_seconds_outside_operators - seconds_outside_operators > _MIN_EXTRA_SECONDS_OUTSIDE
    ):
        words = "spends {} of its time outside torch's operators, this case {}"
        yield from _describe_share_excess(
            base_seconds_outside_operators / base_step_seconds,
            seconds_outside_operators / step_seconds,
            _MIN_EXTRA_SHARE_OUTSIDE,
            words,
        )
    # 3. Compare the time in operators that the reference calls more often than the case.
    if record.tape is None or reference.tape is None:
        return
    products = {operator.operator for operator in reference.tape.operators if operator.flops}
    seconds_by_operator = dict(late_steps.seconds)
    for name, base_seconds in base_late_steps.seconds:
        calls, base_calls = _weigh_operator_calls(record.tape, name), _weigh_operator_calls(reference.tape, name)
        is_reference_slower = (
            base_seconds - seconds_by_operator.get(name, 0.0) > _MIN_EXTRA_OPERATOR_SHARE * base_late_steps.in_operators
        )
        if is_reference_slower and base_calls > _MIN_CALLS_RATIO * calls and name not in products | _COPY_OPERATORS:
            operator_share = units.percent(base_seconds / base_late_steps.in_operators, 0)
            yield f"spends {operator_share} of its operators' time in {name}, which this case calls less"


def _weigh_operator_calls(tape: Tape, name: str) -> float:
    """Returns the weight of an operator in a step: the number of its calls plus the number of tensor elements that they
    read and write.
    """
    return _count_moved_numbers(tape, {name}) + sum(count.calls for count in tape.operators if count.operator == name)


def _compare_product_call_counts(tape: Tape, base: Tape) -> Iterator[str]:
    """Compares how many operator calls the products of a step take. Cases whose kernels batch products are skipped,
    because fewer calls are the advantage of such kernels.
    """
    calls, base_calls = _count_product_calls(tape), _count_product_calls(base)
    uses_grouped_products = any("grouped" in count.operator for count in tape.operators)
    if (
        calls
        and base_calls >= _MIN_PRODUCT_CALLS_RATIO * calls
        and not (uses_grouped_products or tape.fused or base.fused)
    ):
        yield f"multiplies in {base_calls} calls, but this case only in {calls}"


def _count_product_calls(tape: Tape) -> int:
    return sum(count.calls for count in tape.operators if count.flops)


def _compare_layouts(record: Record, reference: Record, base_tape: Tape) -> Iterator[str]:
    """Describes a reference whose tensors are scattered in memory, or that holds more than twice as many tensors of a
    shape as a step reads.

    If consecutive steps use different tensors, they read tensors that are in no cache.
    """
    if record.products is None or reference.products is None:
        return
    tensor_read_counts_by_size = _count_reads_by_size(base_tape)
    tensors_by_shape = {case_tensors.shape: case_tensors for case_tensors in record.products.given}
    for base_tensors in reference.products.given:
        case_tensors = tensors_by_shape.get(base_tensors.shape)
        if case_tensors is None:
            continue
        words = f"{base_tensors.tensors} tensors of {_show_shape(base_tensors)}"
        read_tensor_count = tensor_read_counts_by_size.get(math.prod(base_tensors.shape), 0)
        if base_tensors.tensors > max(2 * read_tensor_count, case_tensors.tensors):
            yield f"holds {words}, of which a step reads {read_tensor_count}; this case holds {case_tensors.tensors}"
        elif base_tensors.scattered > case_tensors.scattered:
            yield f"has numbers of {words} scattered in memory, this case has them contiguous"


def _count_reads_by_size(tape: Tape) -> dict[int, int]:
    """Returns how many tensors a step reads, by the number of elements of a tensor. Parses inputs like
    'fp32[512,512]'.
    """
    read_count_by_size: dict[int, int] = {}
    for operator in tape.operators:
        for words in operator.inputs:
            shape = words.partition("[")[2].rstrip("]")
            element_count = math.prod(map(int, filter(None, shape.split(","))))
            read_count_by_size[element_count] = read_count_by_size.get(element_count, 0) + operator.calls
    return read_count_by_size


def _compare_shares_of_ceiling(record: Record, reference: Record) -> Iterator[str]:
    """Describes a reference whose products are far slower than the machine's peak. Products of attention are left out,
    because attention is a separate phase.
    """
    timing = reference.timing
    if timing is None or timing.num_rounds < verdicts.MIN_ROUNDS_FOR_VERDICT or is_contended(timing):
        return
    share, _ = _compute_product_ceiling_share(record)
    base_share, seconds = _compute_product_ceiling_share(reference)
    min_product_seconds = _MIN_PRODUCT_SECONDS if share >= _NEARER_RATIO * base_share else _LARGE_PRODUCT_SECONDS
    if base_share < _LOW_SHARE_OF_CEILING and seconds >= min_product_seconds:
        base_words, words = units.percent(base_share, 0), units.percent(share, 0)
        yield f"multiplies at {base_words} of what this machine does in its dtype, this case at {words}"


def _compute_product_ceiling_share(record: Record) -> tuple[float, float]:
    """Returns two numbers: the share of the machine's peak that the products of a step reach, and the mean seconds of a
    product at that peak. Returns zeros if either is unknown.
    """
    tape, ceiling, timing = record.tape, record.ceiling, record.timing
    if tape is None or tape.fused or ceiling is None or timing is None:
        return 0.0, 0.0
    products = [operator for operator in tape.operators if operator.flops and operator.phase == Phase.GEMM]
    best_gemm_seconds = dict(verdicts.compute_best_phase_seconds(timing)).get(Phase.GEMM, 0.0)
    # Convolutions are not judged, because they use different kernels in each dtype.
    if not products or not best_gemm_seconds or any("convolution" in product.operator for product in products):
        return 0.0, 0.0
    upper_roofs, memory = upper_bounds_of(ceiling), ceiling.bytes or math.inf
    min_seconds = 0.0
    for product in products:
        flops_per_second = upper_roofs.products.get(product_kind_of(product.path)) or ceiling.flops or math.inf
        min_seconds += product.calls * max((product.flops or 0) / flops_per_second, product.bytes / memory)
    return min_seconds / best_gemm_seconds, min_seconds / sum(product.calls for product in products)


def _compare_moved_numbers(tape: Tape, base_tape: Tape) -> Iterator[str]:
    """Compares how many tensor elements of any width the steps of the case and of the reference read and write. The
    casts of the case are included.
    """
    if tape.fused or tape.unwritten or base_tape.fused or base_tape.unwritten:
        return
    by_dtype, base_by_dtype = _count_moved_values_by_dtype(tape), _count_moved_values_by_dtype(base_tape)
    moved_count, base_moved_count = sum(by_dtype.values()), sum(base_by_dtype.values())
    share, base_share = (
        by_dtype.get("fp64", 0.0) / (moved_count or 1),
        base_by_dtype.get("fp64", 0.0) / (base_moved_count or 1),
    )
    yield from _describe_share_excess(
        base_share, share, _MIN_EXTRA_WIDE_FLOAT_SHARE, "moves {} of its numbers in fp64, this case {}"
    )
    # Compare how many numbers the copies of both steps read and write. Casts are copies.
    extra_copied_numbers = _count_moved_numbers(base_tape, _COPY_OPERATORS) - _count_moved_numbers(
        tape, _COPY_OPERATORS
    )
    if moved_count and base_moved_count >= _MIN_MOVED_NUMBERS_RATIO * moved_count:
        yield f"moves {base_moved_count / moved_count:.1f} times the numbers that this case moves"
    elif extra_copied_numbers > _MIN_EXTRA_COPIED_SHARE * base_moved_count:
        extra_copied_share = units.percent(extra_copied_numbers / base_moved_count, 0)
        yield f"moves {extra_copied_share} of its numbers in copies that this case does not make"


def _count_moved_values_by_dtype(tape: Tape) -> dict[str, float]:
    """Returns how many numbers of each dtype a step moves."""
    count_by_dtype: dict[str, float] = {}
    for phase in tape.phases:
        for dtype, size in phase.by_dtype:
            count_by_dtype[dtype] = count_by_dtype.get(dtype, 0.0) + 8 * size / (get_operand_bits(dtype) or 8)
    return count_by_dtype


def _count_moved_numbers(tape: Tape, names: Collection[str]) -> float:
    """Returns how many numbers the operators called `names` read and write."""
    moved_number_count = 0.0
    for operator in tape.operators:
        if operator.operator in names and operator.outputs:
            operand_bits = [
                get_operand_bits(words.partition("[")[0]) or 8 for words in (*operator.inputs, *operator.outputs)
            ]
            moved_number_count += 8 * operator.calls * operator.bytes * len(operand_bits) / sum(operand_bits)
    return moved_number_count


def _compare_dtype_widths(record: Record, tape: Tape, reference: Record, base_tape: Tape) -> Iterator[str]:
    """Describes a reference that spends a larger share of its FLOPs in casts, or in wide dtypes, than the case.

    A dtype is wide if it has more bits than the narrowest dtype in which the reference does more than 5% of its
    FLOPs. If the reference is an unchanged model, only FLOPs in casts are compared.
    """
    narrowest_bits = 64
    if reference.case.precision != UNTOUCHED:
        main_arithmetic_paths = [
            path for path, flops in base_tape.by_path.items() if flops > _MIN_EXTRA_WIDE_FLOAT_SHARE * base_tape.flops
        ]
        narrowest_bits = min(map(get_operand_bits, main_arithmetic_paths), default=64)
    cast_share, base_cast_share = (
        sum_product_work(counted_tape).rotation_flops / max(counted_tape.flops, 1) for counted_tape in (tape, base_tape)
    )
    words = "multiplies {} of its FLOPs in its casts, this case {}"
    yield from _describe_share_excess(base_cast_share, cast_share, _MIN_EXTRA_WIDE_FLOAT_SHARE, words)
    words = f"multiplies {{}} of its FLOPs in more than {narrowest_bits} bits, this case {{}}"
    yield from _describe_share_excess(
        _compute_share_of_wider_products(base_tape, narrowest_bits),
        _compute_share_of_wider_products(tape, narrowest_bits),
        _MIN_EXTRA_WIDE_FLOAT_SHARE,
        words,
    )


def _compute_share_of_wider_products(tape: Tape, bits: int) -> float:
    return sum(flops for path, flops in tape.by_path.items() if get_operand_bits(path) > bits) / max(tape.flops, 1)
