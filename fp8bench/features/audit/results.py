"""Checks the results of a kernel on ordinary inputs, and in calls that tests usually omit: repeated calls, other
addresses, NaN and infinity, unusual sizes and memory layouts."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import replace
from itertools import product
from random import Random

import torch
from torch import Tensor

from fp8bench.features.audit.auditor import (
    NORMAL_DATA,
    REFUSAL_ERRORS,
    SECOND_SEED_OFFSET,
    AuditCheck,
    AuditInput,
    AuditSession,
    AuditSubject,
    Shape,
)
from fp8bench.features.audit.host import describe_error, reraise_deception, unpack_results
from fp8bench.features.audit.promises import Matrices
from fp8bench.features.audit.values import AuditFinding, make_failure, make_remark
from fp8bench.model.promises import AuditedCallableKind

BLOCK_DATA, BLOCK_SIDE = "blocks of different sizes", 128
_ARGUMENT_ORDINALS = ("first", "second", "third")
ResultsByName = dict[str, Tensor]


def _check_numbers(auditor: AuditSession) -> Iterator[AuditFinding]:
    """Compares the results with the expected ones, on every shape and kind of data. Yields the first failure of each
    result, and each remark once."""
    reported_findings = set()
    for shape in dict.fromkeys(map(auditor.round_up_shape, auditor.subject.shapes)):
        for data in auditor.subject.data_kinds:
            auditor.current = audit_input = AuditInput(data, shape)
            for name, verdict in auditor.judge_kernel_on_input(audit_input).items():
                reported_finding_key = name, verdict.code if verdict.is_remark else "failed"
                if reported_finding_key not in reported_findings:
                    reported_findings.add(reported_finding_key)
                    yield auditor.make_finding(audit_input, name, verdict)
        if any(finding_code == "failed" for _, finding_code in reported_findings):
            return


InputChange = Callable[..., Matrices]
_INPUT_CHANGES_BY_KIND: dict[AuditedCallableKind, dict[str, InputChange]] = {
    AuditedCallableKind.PRODUCT: {
        "the first operand doubled": lambda a, b: (a * 2, b),
        "the first operand negated": lambda a, b: (-a, b),
        "rows in another order": lambda a, b: (a.flip(0), b),
        "the second operand halved": lambda a, b: (a, b / 2),
        "the second operand's rows in another order": lambda a, b: (a, b.flip(0)),
        "blocks of the contraction in another order": lambda *ab: tuple(side.roll(BLOCK_SIDE, 1) for side in ab),
    },
    AuditedCallableKind.ATTENTION: {
        "queries and keys negated": lambda q, k, v: (-q, -k, v),
        "values doubled": lambda q, k, v: (q, k, v * 2),
        "heads in another order": lambda *qkv: tuple(tensor.flip(1) for tensor in qkv),
        "batches in another order": lambda *qkv: tuple(tensor.flip(0) for tensor in qkv),
        "keys and values in another order": lambda q, k, v: (q, k.flip(2), v.flip(2)),
    },
}


def _check_operand_changes(auditor: AuditSession) -> Iterator[AuditFinding]:
    """Scales or permutes the operands, and checks that the result changes accordingly. A failure must show on two
    inputs, because one may be wrong by chance."""
    subject = auditor.subject
    audit_input = auditor.first_input
    if subject.kind is AuditedCallableKind.PRODUCT:
        # Make two blocks along the contraction, because one of the changes exchanges blocks.
        audit_input = AuditInput(BLOCK_DATA, auditor.round_up_shape(audit_input.shape._replace(k=2 * BLOCK_SIDE)))
    seeds = auditor.seed, auditor.seed + SECOND_SEED_OFFSET
    two_inputs = [subject.draw_operands(audit_input.data, audit_input.shape, seed) for seed in seeds]
    for description, change in _INPUT_CHANGES_BY_KIND[subject.kind].items():
        auditor.current = audit_input._replace(data_change=description)
        changed_inputs = (change(*matrices) for matrices in two_inputs)
        if all(auditor.find_failure(changed, auditor.compute_results(changed)) for changed in changed_inputs):
            yield make_failure("relation", f"{description}: the result does not change accordingly")


_UNIFORM_DATA = "uniform"
# A timing loop is imitated by at most _CALLS calls within _REPEAT_SECONDS seconds.
_CALLS, _REPEAT_SECONDS = 110, 2.0
# How many calls on small matrices are compared, and within how many seconds. With so many calls, a wrong result that
# occurs once in 400 calls occurs three times.
_SMALL_CALLS, _SMALL_SECONDS = 1200, 4.0
_POISONED_CALLS = 4
# If results differ from call to call, this many are judged: the results furthest from the first one.
_MAX_JUDGED_RESULTS = 8
# The number under which the kernel's process stores a second set of arguments.
_SECOND_ARGUMENTS_SLOT = 1


def _check_memory_reuse(auditor: AuditSession) -> Iterator[AuditFinding]:
    """Calls the kernel repeatedly at old and new addresses. Finds stale and overwritten results."""
    auditor.current = auditor.first_input
    kernel_host = auditor.subject.host
    auditor.call_kernel(auditor.subject.make_arguments(_draw_matrices_of_kind(auditor, NORMAL_DATA)))
    first_call_results = kernel_host.keep_results()
    later_call_arguments = auditor.subject.make_arguments(_draw_matrices_of_kind(auditor, "rows of different sizes"))
    auditor.call_kernel(later_call_arguments, at_new_address=False)
    if kernel_host.reread_kept_results() != first_call_results:
        yield make_failure("overwritten", "a later call overwrites the result of an earlier call")
    if auditor.has_right_numbers:
        yield from _drop_repeated_findings(
            make_failure(failure_code, reason)
            for failure_code, reason, matrices, results in _iterate_repeated_calls(auditor)
            if auditor.find_failure(matrices, results, search_mistakes=True)
        )
        yield from _check_calls_on_small_matrices(auditor)


def _drop_repeated_findings(findings: Iterable[AuditFinding]) -> Iterator[AuditFinding]:
    reported_codes = set()
    for finding in findings:
        if finding.code not in reported_codes:
            reported_codes.add(finding.code)
            yield finding


def _iterate_repeated_calls(auditor: AuditSession) -> Iterator[tuple[str, str, Matrices, ResultsByName]]:
    """Calls the kernel repeatedly, with changes that reveal cached results. For each call, yields the failure to report
    if the results are wrong (code and description), then the call's matrices and its results.
    """
    kernel_host = auditor.subject.host

    def call_at_old_address(new_matrices: Matrices) -> tuple[Matrices, ResultsByName]:
        return new_matrices, auditor.call_kernel(auditor.subject.make_arguments(new_matrices), at_new_address=False)

    reason = "new values at the same addresses: the result does not belong to them"
    yield "stale", reason, *call_at_old_address(_draw_matrices_of_kind(auditor, _UNIFORM_DATA))
    base, _ = call_at_old_address(_draw_matrices_of_kind(auditor, NORMAL_DATA))
    new_matrices = _draw_matrices_of_kind(auditor, _UNIFORM_DATA)
    for tensor, old in zip(new_matrices, base, strict=True):
        rows, old_rows = (matrix.view(-1, matrix.shape[-1]) for matrix in (tensor, old))
        rows[0], rows[:, 0], rows[-1], rows[:, -1] = old_rows[0], old_rows[:, 0], old_rows[-1], old_rows[:, -1]
    reason = "all rows and columns changed except the first and last: the old results are returned"
    yield "keyed", reason, new_matrices, auditor.compute_results(new_matrices)
    for description, changed in _iterate_confusable_matrices(auditor, base):
        call_at_old_address(base)
        reason = f"{description}, at the same addresses: the old results are returned"
        yield "keyed", reason, *call_at_old_address(changed)
    new_matrices, _ = call_at_old_address(base)
    for _ in range(_POISONED_CALLS):  # the allocator may give the memory of old results to new ones
        kernel_host.overwrite_results()
        reason = "after earlier results were filled with NaN, the next result is wrong"
        yield "uninitialised", reason, new_matrices, unpack_results(kernel_host.call_kernel(0)[0])
    calls, _ = kernel_host.repeat_calls([0], _CALLS, _REPEAT_SECONDS)
    reason = f"after {calls} calls with the same arguments, results are wrong"
    yield "late", reason, *call_at_old_address(_draw_matrices_of_kind(auditor, "outliers along the contraction"))
    call_at_old_address(base)
    yield "address", "the same values at other addresses: the result is wrong", base, auditor.compute_results(base)
    # On a GPU, write the inputs late on a separate stream, and call the kernel on that stream.
    new_matrices = _draw_matrices_of_kind(auditor, _UNIFORM_DATA)
    auditor.send_arguments(auditor.subject.make_arguments(new_matrices), _SECOND_ARGUMENTS_SLOT)
    auditor.send_arguments(auditor.subject.make_arguments(base))
    stream_results = kernel_host.call_on_busy_stream(0, _SECOND_ARGUMENTS_SLOT)
    if stream_results is not None:
        reason = "it does not wait for earlier work on its caller's stream"
        yield "stream", reason, new_matrices, unpack_results(stream_results)


def _iterate_confusable_matrices(auditor: AuditSession, base: Matrices) -> Iterator[tuple[str, Matrices]]:
    """Yields matrices that a kernel with cached results may confuse with earlier ones. They differ in only one or two
    rows, and have equal sums or equal largest numbers.
    """
    rng = Random(auditor.seed)
    for operand, matrix in enumerate(base):
        rows = matrix.view(-1, matrix.shape[-1])
        row, second_row = rng.sample(range(len(rows)), 2) if len(rows) > 1 else (0, 0)
        negated_rows = rows.clone()
        negated_rows[row] = -negated_rows[row]
        yield (
            f"one row of the {_ARGUMENT_ORDINALS[operand]} argument is negated",
            _replace_operand(base, operand, negated_rows.view_as(matrix)),
        )
        exchanged_rows = rows.clone()
        exchanged_rows[[row, second_row]] = rows[[second_row, row]]
        description = f"two rows of the {_ARGUMENT_ORDINALS[operand]} argument are exchanged"
        yield description, _replace_operand(base, operand, exchanged_rows.view_as(matrix))


def _check_calls_on_small_matrices(auditor: AuditSession) -> Iterator[AuditFinding]:
    """Calls the kernel on small matrices very often. Results may differ from call to call, but each must be right."""
    subject = auditor.subject
    kernel_host = subject.host
    shape = auditor.round_up_shape(subject.small_shape)
    matrices_by_slot = {}
    try:
        for slot, data in enumerate((NORMAL_DATA, _UNIFORM_DATA, "small")):
            auditor.current = AuditInput(data, shape)
            matrices_by_slot[slot] = auditor.draw_matrices(auditor.current)
            auditor.call_kernel(subject.make_arguments(matrices_by_slot[slot]), slot)
    except REFUSAL_ERRORS:  # a kernel may refuse small inputs
        matrices_by_slot = {0: auditor.draw_matrices(auditor.first_input)}
        shape = auditor.first_input.shape
        auditor.send_arguments(subject.make_arguments(matrices_by_slot[0]))
    auditor.current = AuditInput(NORMAL_DATA, shape)
    calls, changed_results = kernel_host.repeat_calls(list(matrices_by_slot), _SMALL_CALLS, _SMALL_SECONDS)
    first_results = {slot: unpack_results(results) for _, slot, results in reversed(changed_results)}
    changed_results.sort(key=lambda row: _sum_differences(first_results[row[1]], unpack_results(row[2])), reverse=True)
    for call_number, slot, packed_results in changed_results[:_MAX_JUDGED_RESULTS]:
        if failure := auditor.find_failure(matrices_by_slot[slot], unpack_results(packed_results)):
            yield make_failure("differs", f"call {call_number} of {calls} on the same arguments: {failure.why}")
            return


def _sum_differences(first: ResultsByName, results: ResultsByName) -> float:
    differences = ((first[name].double() - result.double()).abs() for name, result in results.items())
    return sum(float(tensor.nan_to_num(math.inf).sum()) for tensor in differences)


def _check_backward(auditor: AuditSession) -> Iterator[AuditFinding]:
    """Runs a linear layer forward on two inputs, then backward for both. Gradients must belong to their input."""
    subject = auditor.subject
    auditor.current = auditor.first_input
    two_inputs = [auditor.draw_matrices(auditor.first_input), _draw_matrices_of_kind(auditor, _UNIFORM_DATA)]
    for backward_order in ((0, 1), (1, 0)):
        for slot, matrices in enumerate(two_inputs):
            auditor.send_arguments(subject.make_arguments(matrices), slot)
        for matrices, results in zip(two_inputs, subject.host.call_pair((0, 1), backward_order), strict=True):
            if failure := auditor.find_failure(matrices, unpack_results(results)):
                order_text = "the first" if backward_order[0] == 0 else "the last"
                yield make_failure(
                    "backward", f"two forward calls, then backward starting with {order_text} call: {failure.why}"
                )
                return


# The time limit of the check of sizes. An idle machine needs a few seconds. A busy machine may skip the largest
# sizes, which come last.
_SIZE_CHECK_SECONDS = 40.0
_TILE_DATA, _SIGN_DATA = "tiles of different sizes", "ones and 10% minus ones"
# The contraction length from which bfloat16 cannot hold sums of +1 and -1.
_LONG_CONTRACTION_LENGTH = 2000
_RANDOM_SHAPE_COUNT = 4


def _check_sizes(auditor: AuditSession) -> Iterator[AuditFinding]:
    """Calls the kernel with sizes of real models, of decoding and at random. A sample of each result is judged."""
    subject = auditor.subject
    rng = Random(auditor.seed)
    shapes = [*subject.real_shapes, *(_draw_shape(subject, rng) for _ in range(_RANDOM_SHAPE_COUNT))]
    data = _TILE_DATA if _TILE_DATA in subject.data_kinds else NORMAL_DATA
    inputs = []
    for shape in sorted(map(auditor.round_up_shape, shapes), key=math.prod):
        inputs.append(AuditInput(data, shape))
        if shape.m <= _MAX_DECODING_ROWS and shape.k >= _LONG_CONTRACTION_LENGTH and _SIGN_DATA in subject.data_kinds:
            inputs.append(AuditInput(_SIGN_DATA, shape))

    def judge_input(audit_input: AuditInput) -> AuditFinding | None:
        matrices = auditor.draw_matrices(audit_input)
        return auditor.find_failure(matrices, auditor.compute_results(matrices), rng)

    yield from _judge_inputs_until_failure(auditor, inputs, judge_input, _SIZE_CHECK_SECONDS)


# The largest number of rows in a decoding step.
_MAX_DECODING_ROWS = 8


def _draw_shape(subject: AuditSubject, rng: Random) -> Shape:
    max_random_shape = Shape(1024, 8, 128) if subject.kind is AuditedCallableKind.ATTENTION else Shape(512, 1024, 2048)
    return Shape(*(round(side ** rng.uniform(0.3, 1.0)) for side in max_random_shape))


def _draw_matrices_of_kind(auditor: AuditSession, data: str) -> Matrices:
    return auditor.draw_matrices(auditor.first_input._replace(data=data))


def _check_special_values(auditor: AuditSession) -> Iterator[AuditFinding]:
    yield from _drop_repeated_findings(_iterate_special_value_failures(auditor))


def _iterate_special_value_failures(auditor: AuditSession) -> Iterator[AuditFinding]:
    """Checks that a NaN or infinity does not become an ordinary number, and that zeros give zeros."""
    subject = auditor.subject
    matrices = auditor.draw_matrices(auditor.first_input)
    refusal_remarks = []

    def call_with(change: str, changed: Matrices) -> ResultsByName:
        auditor.current = AuditInput("", auditor.first_input.shape, change)
        try:
            results = auditor.compute_results(changed)
        except REFUSAL_ERRORS as error:
            reraise_deception(error)
            refusal_remarks.append(
                auditor.add_input_to_finding(
                    auditor.current, make_remark("raises", f"{change}: {describe_error(error)}")
                )
            )
            return {}
        auditor.tried += len(results)
        return results

    zeroed_index = subject.zeroed_operand_index
    results = call_with("zeros", _replace_operand(matrices, zeroed_index, torch.zeros_like(matrices[zeroed_index])))
    if results and _get_first_result(results).any():
        yield make_failure("zeros", "an input of zeros gave results that are not zero")
    subnormal_matrix = matrices[0] * torch.finfo(matrices[0].dtype).smallest_normal / 4
    results = call_with("subnormal numbers", _replace_operand(matrices, 0, subnormal_matrix))
    if results and not _get_first_result(results).isfinite().all():
        yield make_failure("subnormal", "an input of subnormal numbers gave NaN or infinity")
    for operand, matrix in enumerate(matrices):
        last_index = matrix.numel() - 1
        for index in (0, (last_index - matrix.shape[-1]) // 2, last_index):
            row, column = divmod(index, matrix.shape[-1])
            location = f"in the {_ARGUMENT_ORDINALS[operand]} argument's row {row}, column {column}"
            matrices_with_nan, matrices_with_infinity, matrices_with_zero = (
                _set_element(matrices, operand, index, number) for number in (math.nan, math.inf, 0.0)
            )
            results = call_with(f"a NaN {location}", matrices_with_nan)
            if results and not _select_results_of_row(subject, results, operand, row).isnan().any():
                yield make_failure("nan-lost", f"a NaN {location}: the results that depend on it have no NaN")
            if subject.kind is AuditedCallableKind.ATTENTION:
                continue
            # An infinity may become the largest number or NaN, but must not count as zero.
            results = call_with(f"an infinity {location}", matrices_with_infinity)
            if results and _select_results_of_row(subject, results, operand, row).isfinite().all():
                expected = subject.expected_results(matrices_with_zero)
                verdicts = [expected[name].judge(result, search_mistakes=False) for name, result in results.items()]
                if not any(verdict.has_failed for verdict in verdicts):
                    reason = f"an infinity {location}: results are those of a zero in its place"
                    yield make_failure("infinity-lost", reason)
    yield from refusal_remarks


def _get_first_result(results: ResultsByName) -> Tensor:
    """Returns the only result, or the forward result of a linear layer."""
    return next(iter(results.values()))


def _select_results_of_row(subject: AuditSubject, results: ResultsByName, operand: int, row: int) -> Tensor:
    """Returns the part of the results that depends on this row of an operand."""
    result = _get_first_result(results)
    if subject.kind is AuditedCallableKind.LINEAR and operand == 2:  # operand 2 is the gradient of the output
        result = results["input gradient"]
    result = result.reshape(-1, result.shape[-1])
    if subject.kind is AuditedCallableKind.ATTENTION and operand:
        return result
    return result[:, row] if operand == 1 else result[row]


def _replace_operand(matrices: Matrices, operand: int, tensor: Tensor) -> Matrices:
    return *matrices[:operand], tensor, *matrices[operand + 1 :]


def _set_element(matrices: Matrices, operand: int, index: int, number: float) -> Matrices:
    changed_matrix = matrices[operand].clone()
    changed_matrix.view(-1)[index] = number
    return _replace_operand(matrices, operand, changed_matrix)


def _check_extreme_values(auditor: AuditSession) -> Iterator[AuditFinding]:
    """Calls the kernel with very large and small values, with tall and long matrices, and with some rows of zeros."""
    tall_shape = auditor.round_up_shape(auditor.subject.tall_shape)
    for audit_input, matrices in _iterate_extreme_inputs(auditor):
        auditor.current = audit_input
        rng = Random(auditor.seed) if audit_input.shape == tall_shape else None
        if failure := auditor.find_failure(matrices, auditor.compute_results(matrices), rng):
            yield failure
            return


def _iterate_extreme_inputs(auditor: AuditSession) -> Iterator[tuple[AuditInput, Matrices]]:
    subject = auditor.subject
    first_input = auditor.first_input
    matrices = auditor.draw_matrices(first_input)
    # Multiply operands by large and small powers of two, which fp16 or casts without scales cannot represent. In
    # attention, multiply only the values, because larger queries and keys change the softmax.
    operands = (2,) if subject.kind is AuditedCallableKind.ATTENTION else range(len(matrices))
    casts_have_scales = all(cast is None or cast.scaling is not None for cast in subject.promised_casts.treatments)
    for operand in operands if matrices[0].dtype is not torch.float16 and casts_have_scales else ():
        for exponent in (40, -40):
            yield (
                first_input._replace(data_change=f"the {_ARGUMENT_ORDINALS[operand]} argument times 2^{exponent}"),
                _replace_operand(matrices, operand, matrices[operand] * 2.0**exponent),
            )
    tall_input = first_input._replace(shape=auditor.round_up_shape(subject.tall_shape))
    sparse_matrices = auditor.draw_matrices(first_input)
    tall_matrices = auditor.draw_matrices(tall_input)
    for sparse_matrix, tall_matrix in zip(sparse_matrices, tall_matrices, strict=True):
        sparse_matrix.view(-1, sparse_matrix.shape[-1])[1] = 0
        sparse_matrix.view(-1, sparse_matrix.shape[-1])[2, :BLOCK_SIDE] = 0
        tall_matrix.view(-1, tall_matrix.shape[-1])[-1, -8:] *= 16
    yield first_input._replace(data_change="a row and a block of zeros in each argument"), sparse_matrices
    yield tall_input._replace(data_change="the largest numbers in the last rows"), tall_matrices
    if _SIGN_DATA in subject.data_kinds:
        sign_input = tall_input._replace(data=_SIGN_DATA)
        yield sign_input, auditor.draw_matrices(sign_input)


def _judge_inputs_until_failure(
    auditor: AuditSession,
    inputs: Collection[AuditInput],
    judge_input: Callable[[AuditInput], AuditFinding | None],
    seconds: float = math.inf,
) -> Iterator[AuditFinding]:
    """Judges the kernel on each input, until one fails or the time is up. The kernel may refuse inputs."""
    refusals = []
    end = time.monotonic() + seconds
    # Record the current input in the auditor, so that exceptions are reported with it.
    for index, audit_input in enumerate(inputs):
        auditor.current = audit_input
        if time.monotonic() > end:
            larger_count = len(inputs) - index - 1
            reason = f"the time limit of {seconds:g} s was reached: this and {larger_count} larger sizes were not tried"
            yield make_remark("not-tried", reason)
            break
        try:
            failure = judge_input(audit_input)
        # A kernel may refuse an input, unless the error shows that the kernel cheats.
        except REFUSAL_ERRORS as error:
            reraise_deception(error)
            refusals.append(auditor.add_input_to_finding(audit_input, make_remark("refused", describe_error(error))))
            continue
        if failure:
            yield failure
            return
    # Report all refusals in one line: a kernel with fixed sizes refuses dozens of inputs.
    if refusals:
        yield replace(refusals[0], why=f"{len(refusals)} of {len(inputs)} such calls are refused: {refusals[0].why}")


def _check_strides(auditor: AuditSession) -> Iterator[AuditFinding]:
    """Calls the kernel with matrices that are slices of larger ones, or transposed in memory."""
    subject = auditor.subject
    odd_shape_input = AuditInput(NORMAL_DATA, auditor.round_up_shape(subject.unaligned_shapes[1]))
    strided_calls = {}
    for audit_input in (auditor.first_input, odd_shape_input):
        matrices = auditor.draw_matrices(audit_input)
        for operand, (description, change_layout) in product(range(len(matrices)), _MEMORY_LAYOUTS.items()):
            strided_input = audit_input._replace(
                data_change=f"the {_ARGUMENT_ORDINALS[operand]} argument {description}"
            )
            strided_calls[strided_input] = matrices, operand, change_layout

    def judge_input(audit_input: AuditInput) -> AuditFinding | None:
        matrices, operand, change_layout = strided_calls[audit_input]
        arguments = subject.make_arguments(matrices)
        strided_arguments = _replace_operand(arguments, operand, change_layout(arguments[operand]))
        if auditor.find_failure(matrices, auditor.call_kernel(strided_arguments)) is None:
            return None
        return make_failure("strides", f"{audit_input.data_change}: the result does not belong to its values")

    yield from _judge_inputs_until_failure(auditor, strided_calls, judge_input)


def _make_slice(x: Tensor) -> Tensor:
    next_rows = torch.cat((x[1:], x[:1]))
    return torch.cat((next_rows, x, next_rows), -1)[..., x.shape[-1] : 2 * x.shape[-1]]


def _transpose_memory_layout(x: Tensor) -> Tensor:
    """Returns a tensor with the same shape and values, but a transposed memory layout: rows and columns of a matrix are
    exchanged in memory, or positions and heads.
    """
    swapped_dimensions = (1, 2) if x.dim() > 2 else (0, 1)
    return x.transpose(*swapped_dimensions).contiguous().transpose(*swapped_dimensions)


_MEMORY_LAYOUTS = {"is a slice of a wider matrix": _make_slice, "is transposed in memory": _transpose_memory_layout}


def _check_odd_shapes(auditor: AuditSession) -> Iterator[AuditFinding]:
    """Calls the kernel with sizes that do not fill complete tiles."""

    def judge_input(audit_input: AuditInput) -> AuditFinding | None:
        for name, verdict in auditor.judge_kernel_on_input(audit_input).items():
            if verdict.has_failed:
                return auditor.make_finding(audit_input, name, verdict)
        return None

    data_kinds = [data for data in (NORMAL_DATA, BLOCK_DATA) if data in auditor.subject.data_kinds]
    inputs = [AuditInput(data, shape) for data, shape in product(data_kinds, auditor.subject.unaligned_shapes)]
    yield from _judge_inputs_until_failure(auditor, inputs, judge_input)


# The checks of results, in the order in which they run.
RESULT_CHECKS = (
    AuditCheck("numbers", _check_numbers, judges_numbers=True),
    AuditCheck("relations", _check_operand_changes, frozenset(_INPUT_CHANGES_BY_KIND), needs_correct_numbers=True),
    AuditCheck("memory", _check_memory_reuse),
    AuditCheck("backward", _check_backward, frozenset({AuditedCallableKind.LINEAR}), needs_correct_numbers=True),
    AuditCheck("special values", _check_special_values),
    AuditCheck("odd shapes", _check_odd_shapes, needs_correct_numbers=True),
    AuditCheck("strides", _check_strides, needs_correct_numbers=True),
    AuditCheck("sizes", _check_sizes, needs_correct_numbers=True),
    AuditCheck("extremes", _check_extreme_values, needs_correct_numbers=True),
)
