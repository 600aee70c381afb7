"""Checks of results: their numbers, and calls that ordinary tests omit: repeated, at other addresses, with numbers that
are not finite, and with unusual sizes and layouts."""

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
    ANOTHER,
    NORMAL,
    REFUSALS,
    AuditCheck,
    AuditInput,
    Auditor,
    Shape,
    Subject,
)
from fp8bench.features.audit.host import raise_lie, unpack_results, words_of
from fp8bench.features.audit.promises import Matrices
from fp8bench.features.audit.values import AuditFinding, fail, remark
from fp8bench.model.promises import AuditKind

BLOCKS, BLOCK = "blocks of different sizes", 128
_ORDINALS = ("first", "second", "third")
Results = dict[str, Tensor]


def _numbers(auditor: Auditor) -> Iterator[AuditFinding]:
    """Compares the results on every shape and kind of data with the promise. Yields the first failure of each result,
    and each remark once."""
    reported: set[tuple[str, str]] = set()
    for shape in dict.fromkeys(map(auditor.fitting, auditor.subject.shapes)):
        for data in auditor.subject.data:
            auditor.current = tried = AuditInput(data, shape)
            for name, verdict in auditor.problems(tried).items():
                key = name, verdict.code if verdict.remark else "failed"
                if key not in reported:
                    reported.add(key)
                    yield auditor.finding(tried, name, verdict)
        if any(code == "failed" for _, code in reported):
            return


Change = Callable[..., Matrices]
_CHANGES: dict[AuditKind, dict[str, Change]] = {
    AuditKind.PRODUCT: {
        "the first operand doubled": lambda a, b: (a * 2, b),
        "the first operand negated": lambda a, b: (-a, b),
        "rows in another order": lambda a, b: (a.flip(0), b),
        "the second operand halved": lambda a, b: (a, b / 2),
        "the second operand's rows in another order": lambda a, b: (a, b.flip(0)),
        "blocks of the contraction in another order": lambda *ab: tuple(side.roll(BLOCK, 1) for side in ab),
    },
    AuditKind.ATTENTION: {
        "queries and keys negated": lambda q, k, v: (-q, -k, v),
        "values doubled": lambda q, k, v: (q, k, v * 2),
        "heads in another order": lambda *qkv: tuple(tensor.flip(1) for tensor in qkv),
        "batches in another order": lambda *qkv: tuple(tensor.flip(0) for tensor in qkv),
        "keys and values in another order": lambda q, k, v: (q, k.flip(2), v.flip(2)),
    },
}


def _relations(auditor: Auditor) -> Iterator[AuditFinding]:
    """Doubles or permutes operands, which must do the same to results. Uses two inputs: one may be wrong by chance."""
    subject, tried = auditor.subject, auditor.first
    if subject.kind is AuditKind.PRODUCT:
        tried = AuditInput(BLOCKS, auditor.fitting(tried.shape._replace(k=2 * BLOCK)))
    pair = [subject.draw(tried.data, tried.shape, auditor.seed + offset) for offset in (0, ANOTHER)]
    for words, change in _CHANGES[subject.kind].items():
        auditor.current = tried._replace(how=words)
        both = (change(*matrices) for matrices in pair)
        if all(auditor.wrong(changed, auditor.results(changed), search=False) for changed in both):
            yield fail("relation", f"{words}: the result does not follow")


_OTHER = "uniform"
# A timing loop is imitated by this many calls, or by those that fit into this many seconds.
_CALLS, _LONGEST = 110, 2.0
# Calls on small matrices that are compared: a result that differs once in 400 calls differs three times.
_SMALL_CALLS, _SMALL_LONGEST = 1200, 4.0
_POISONED = 4
# If results differ from call to call, this many are judged: those furthest from the first.
_JUDGED = 8
# The slot for a check's second set of arguments.
_SECOND = 1


def _memory(auditor: Auditor) -> Iterator[AuditFinding]:
    """Calls the kernel repeatedly, and changes memory around it."""
    auditor.current, host = auditor.first, auditor.subject.host
    auditor.call(auditor.subject.arguments(_draw(auditor, NORMAL)))
    first = host.reread()
    host.keep()
    auditor.call(auditor.subject.arguments(_draw(auditor, "rows of different sizes")), moved=False)
    if host.reread_kept() != first:
        yield fail("overwritten", "a later call writes into the result of an earlier one")
    if auditor.sound:
        calls = _repeated_calls(auditor)
        yield from _first_of_each_code(
            fail(code, reason) for code, reason, matrices, results in calls if auditor.wrong(matrices, results)
        )
        yield from _check_small_calls(auditor)


def _first_of_each_code(findings: Iterable[AuditFinding]) -> Iterator[AuditFinding]:
    reported: set[str] = set()
    for finding in findings:
        if finding.code not in reported:
            reported.add(finding.code)
            yield finding


def _repeated_calls(auditor: Auditor) -> Iterator[tuple[str, str, Matrices, Results]]:
    """Yields failures of repeated calls as code and description, with the matrices and the results."""
    host = auditor.subject.host

    def call_refilled(fresh: Matrices) -> tuple[Matrices, Results]:
        return fresh, auditor.call(auditor.subject.arguments(fresh), moved=False)

    yield (
        "stale",
        "other values at the same addresses: the result is not theirs",
        *call_refilled(_draw(auditor, _OTHER)),
    )
    base, _ = call_refilled(_draw(auditor, NORMAL))
    fresh = _draw(auditor, _OTHER)
    for tensor, old in zip(fresh, base, strict=True):
        rows, old_rows = (matrix.view(-1, matrix.shape[-1]) for matrix in (tensor, old))
        rows[0], rows[:, 0], rows[-1], rows[:, -1] = old_rows[0], old_rows[:, 0], old_rows[-1], old_rows[:, -1]
    yield "keyed", "all but the first and last rows and columns changed: old results", fresh, auditor.results(fresh)
    for words, changed in _similar_inputs(auditor, base):
        call_refilled(base)
        yield "keyed", f"{words}, at the same addresses: old results", *call_refilled(changed)
    fresh, _ = call_refilled(base)
    for _ in range(_POISONED):  # the allocator may reuse the memory of results
        host.spoil()
        reason = "after results were filled with NaN the next is wrong"
        yield "uninitialised", reason, fresh, unpack_results(host.call(0)[0])
    calls, _ = host.repeat([0], _CALLS, _LONGEST)
    reason = f"after {calls} calls with the same arguments results are wrong"
    yield "late", reason, *call_refilled(_draw(auditor, "outliers along the contraction"))
    call_refilled(base)
    yield "address", "the same values at other addresses: the result is wrong", base, auditor.results(base)
    # On a GPU, inputs are written late on a separate stream, and the kernel is called on that stream after them.
    fresh = _draw(auditor, _OTHER)
    auditor.place(auditor.subject.arguments(fresh), _SECOND)
    auditor.place(auditor.subject.arguments(base))
    late = host.call_late(0, _SECOND)
    if late is not None:
        yield "stream", "on its caller's stream it does not wait for what went before", fresh, unpack_results(late)


def _similar_inputs(auditor: Auditor, base: Matrices) -> Iterator[tuple[str, Matrices]]:
    """Yields matrices that a careless kernel confuses with earlier ones: equal except for a few elements, or with equal
    sums or equal largest numbers."""
    chance = Random(auditor.seed)
    for operand, matrix in enumerate(base):
        rows = matrix.view(-1, matrix.shape[-1])
        row, second_row = chance.sample(range(len(rows)), 2) if len(rows) > 1 else (0, 0)
        alone = rows.clone()
        alone[row] = -alone[row]
        yield (
            f"one row of the {_ORDINALS[operand]} argument is negated",
            _replace(base, operand, alone.view_as(matrix)),
        )
        exchanged = rows.clone()
        exchanged[[row, second_row]] = rows[[second_row, row]]
        words = f"two rows of the {_ORDINALS[operand]} argument are exchanged"
        yield words, _replace(base, operand, exchanged.view_as(matrix))


def _check_small_calls(auditor: Auditor) -> Iterator[AuditFinding]:
    """Calls it very often on small matrices. Results may differ from call to call, but each must be right."""
    subject, host = auditor.subject, auditor.subject.host
    shape = auditor.fitting(subject.small)
    several = {}
    try:
        for slot, data in enumerate((NORMAL, _OTHER, "small")):
            auditor.current = AuditInput(data, shape)
            several[slot] = auditor.matrices(auditor.current)
            auditor.call(subject.arguments(several[slot]), slot)
    except REFUSALS:  # it may refuse small inputs
        several = {0: auditor.matrices(auditor.first)}
        shape = auditor.first.shape
        auditor.place(subject.arguments(several[0]))
    auditor.current = AuditInput(NORMAL, shape)
    calls, different = host.repeat(list(several), _SMALL_CALLS, _SMALL_LONGEST)
    firsts = {slot: unpack_results(results) for _, slot, results in reversed(different)}
    different.sort(key=lambda row: _distance(firsts[row[1]], unpack_results(row[2])), reverse=True)
    for at, slot, packed in different[:_JUDGED]:
        if wrong := auditor.wrong(several[slot], unpack_results(packed), search=False):
            yield fail("differs", f"call {at} of {calls} on the same arguments: {wrong.why}")
            return


def _distance(first: Results, results: Results) -> float:
    apart = ((first[name].double() - result.double()).abs() for name, result in results.items())
    return sum(float(tensor.nan_to_num(math.inf).sum()) for tensor in apart)


def _backward(auditor: Auditor) -> Iterator[AuditFinding]:
    """Calls a linear layer forward twice, then both backward: gradients must belong to the matching forward call."""
    subject, auditor.current = auditor.subject, auditor.first
    pair = [auditor.matrices(auditor.first), _draw(auditor, _OTHER)]
    for order in ((0, 1), (1, 0)):
        for slot, matrices in enumerate(pair):
            auditor.place(subject.arguments(matrices), slot)
        for matrices, results in zip(pair, subject.host.pair((0, 1), order), strict=True):
            if wrong := auditor.wrong(matrices, unpack_results(results), search=False):
                words = "the first" if order[0] == 0 else "the last"
                yield fail("backward", f"two calls forward, then backward beginning with {words}: {wrong.why}")
                return


# An idle machine needs a few seconds for all sizes; on a busy one the largest, which come last, need more.
_SIZES_SECONDS = 40.0
_TILES, _LEAN = "tiles of different sizes", "signs that lean"
# From this length on, bfloat16 cannot hold sums of signs.
_LONG = 2000
_RANDOM_SIZES = 4


def _sizes(auditor: Auditor) -> Iterator[AuditFinding]:
    """Tries sizes of real models, of decoding, and random ones; a sample of each result is judged."""
    subject, chance = auditor.subject, Random(auditor.seed)
    shapes = [*subject.sizes, *(_random_shape(subject, chance) for _ in range(_RANDOM_SIZES))]
    data = _TILES if _TILES in subject.data else NORMAL
    inputs = []
    for shape in sorted(map(auditor.fitting, shapes), key=math.prod):
        inputs.append(AuditInput(data, shape))
        if shape.m <= _FEW_ROWS and shape.k >= _LONG and _LEAN in subject.data:
            inputs.append(AuditInput(_LEAN, shape))

    def look(tried: AuditInput) -> list[AuditFinding]:
        matrices = auditor.matrices(tried)
        wrong = auditor.wrong_sample(matrices, auditor.results(matrices), chance)
        return [wrong] if wrong else []

    yield from _check_each(auditor, inputs, look, _SIZES_SECONDS)


# Decoding multiplies at most this many rows.
_FEW_ROWS = 8


def _random_shape(subject: Subject, chance: Random) -> Shape:
    largest = Shape(1024, 8, 128) if subject.kind is AuditKind.ATTENTION else Shape(512, 1024, 2048)
    return Shape(*(round(side ** chance.uniform(0.3, 1.0)) for side in largest))


def _draw(auditor: Auditor, data: str) -> Matrices:
    return auditor.matrices(auditor.first._replace(data=data))


def _special_values(auditor: Auditor) -> Iterator[AuditFinding]:
    yield from _first_of_each_code(_special_value_failures(auditor))


def _special_value_failures(auditor: Auditor) -> Iterator[AuditFinding]:
    """Checks that a NaN or infinity does not become an ordinary number, and that zeros stay zeros."""
    subject, matrices, refused = auditor.subject, auditor.matrices(auditor.first), list[AuditFinding]()

    def call_with(how: str, changed: Matrices) -> Results:
        auditor.current = AuditInput("", auditor.first.shape, how)
        try:
            results = auditor.results(changed)
        except REFUSALS as error:
            raise_lie(error)
            refused.append(auditor.about(auditor.current, remark("raises", f"{how}: {words_of(error)}")))
            return {}
        auditor.tried += len(results)
        return results

    first, *remaining = matrices
    zeros = (torch.zeros_like(x) if place in subject.zeroed else x for place, x in enumerate(matrices))
    for result in list(call_with("zeros", tuple(zeros)).values())[:1]:
        if bool((result != 0).any()):
            yield fail("zeros", "zeros gave other numbers")
    tiny = first * torch.finfo(first.dtype).smallest_normal / 4
    for result in list(call_with("subnormal numbers", (tiny, *remaining)).values())[:1]:
        if not bool(result.isfinite().all()):
            yield fail("subnormal", "of subnormal numbers something came out that is not finite")
    for operand, matrix in enumerate(matrices):
        last = matrix.numel() - 1
        for index in (0, (last - matrix.shape[-1]) // 2, last):
            row, column = divmod(index, matrix.shape[-1])
            where = f"in the {_ORDINALS[operand]} argument's row {row}, column {column}"
            nan, infinity, zero = (
                _set_element(matrices, operand, index, number) for number in (math.nan, math.inf, 0.0)
            )
            results = call_with(f"a NaN {where}", nan)
            if results and not bool(_reachable(subject, results, operand, row).isnan().any()):
                yield fail("nan-lost", f"a NaN {where}: what it goes into is all numbers")
            # An infinity may become the largest number, or NaN, but must not count as a zero.
            results = call_with(f"an infinity {where}", infinity) if subject.kind is not AuditKind.ATTENTION else {}
            if results and bool(_reachable(subject, results, operand, row).isfinite().all()):
                promises = subject.promises(zero)
                if not any(promises[name].judge(result, search=False).failed for name, result in results.items()):
                    yield fail("infinity-lost", f"an infinity {where}: results are those of a zero")
    yield from refused


def _reachable(subject: Subject, results: Results, operand: int, row: int) -> Tensor:
    """Returns the results that depend on a row of an operand."""
    kind, several = subject.kind, list(results.values())
    result = several[operand == 2 and kind is AuditKind.LINEAR]
    result = result.reshape(-1, result.shape[-1])
    if kind is AuditKind.ATTENTION and operand:
        return result
    return result[:, row] if operand == 1 else result[row]


def _replace(matrices: Matrices, operand: int, tensor: Tensor) -> Matrices:
    return *matrices[:operand], tensor, *matrices[operand + 1 :]


def _set_element(matrices: Matrices, operand: int, index: int, number: float) -> Matrices:
    changed = matrices[operand].clone()
    changed.view(-1)[index] = number
    return _replace(matrices, operand, changed)


def _extremes(auditor: Auditor) -> Iterator[AuditFinding]:
    """Tries what tests leave out: values far from one, tall and long matrices, and rows of zeros among others."""
    tall = auditor.fitting(auditor.subject.tall)
    for tried, matrices in _extreme_inputs(auditor):
        auditor.current, results = tried, auditor.results(matrices)
        if tried.shape == tall:
            wrong = auditor.wrong_sample(matrices, results, Random(auditor.seed))
        else:
            wrong = auditor.wrong(matrices, results, search=False)
        if wrong:
            yield wrong
            return


def _extreme_inputs(auditor: Auditor) -> Iterator[tuple[AuditInput, Matrices]]:
    subject, tried = auditor.subject, auditor.first
    matrices = auditor.matrices(tried)
    # Only operands with scales can be far from one, and not in fp16. For attention only the values: scaling queries and
    # keys changes the softmax.
    operands = (2,) if subject.kind is AuditKind.ATTENTION else range(len(matrices))
    is_scaled = all(cast is None or cast.scaling is not None for cast in subject.promise.treatments)
    for operand in operands if matrices[0].dtype is not torch.float16 and is_scaled else ():
        for power in (40, -40):
            yield (
                tried._replace(how=f"the {_ORDINALS[operand]} argument times 2^{power}"),
                _replace(matrices, operand, matrices[operand] * 2.0**power),
            )
    tall = tried._replace(shape=auditor.fitting(subject.tall))
    empty, large = auditor.matrices(tried), auditor.matrices(tall)
    for some, many in zip(empty, large, strict=True):
        some.view(-1, some.shape[-1])[1] = 0
        some.view(-1, some.shape[-1])[2, :BLOCK] = 0
        many.view(-1, many.shape[-1])[-1, -8:] *= 16
    yield tried._replace(how="a row and a block of zeros in each argument"), empty
    yield tall._replace(how="the largest in the last rows"), large
    if "signs that lean" in subject.data:
        signs = tall._replace(data="signs that lean")
        yield signs, auditor.matrices(signs)


def _check_each(
    auditor: Auditor,
    inputs: Collection[AuditInput],
    look: Callable[[AuditInput], list[AuditFinding]],
    seconds: float = math.inf,
) -> Iterator[AuditFinding]:
    """Looks for failures in calls that may be refused, until one is wrong or time is up."""
    refused, end = [], time.monotonic() + seconds
    # The auditor records the current input, so that exceptions name it.
    for place, tried in enumerate(inputs):
        auditor.current = tried
        if time.monotonic() > end:
            untried = len(inputs) - place
            words = f"time was up after {seconds:g} s: this and {untried - 1} larger sizes were not called"
            yield remark("not-tried", words)
            break
        try:
            wrong = look(tried)
        # A refusal is legitimate, unless the kernel lied about the reason.
        except REFUSALS as error:
            raise_lie(error)
            refused.append(auditor.about(tried, remark("refused", words_of(error))))
            continue
        if wrong:
            yield wrong[0]
            return
    # One line for all refusals: a kernel with fixed sizes refuses dozens.
    if refused:
        yield replace(refused[0], why=f"{len(refused)} of {len(inputs)} such calls are refused: {refused[0].why}")


def _strides(auditor: Auditor) -> Iterator[AuditFinding]:
    """Tries matrices that are slices of others, or transposed in memory."""
    subject, odd = auditor.subject, AuditInput(NORMAL, auditor.fitting(auditor.subject.odd[1]))
    drawn = [(start, auditor.matrices(start)) for start in (auditor.first, odd)]

    def look(tried: AuditInput) -> list[AuditFinding]:
        matrices, operand, laid = calls[tried]
        arguments = subject.arguments(matrices)
        moved = _replace(arguments, operand, laid(arguments[operand]))
        wrong = auditor.wrong(matrices, auditor.call(moved), search=False)
        return [fail("strides", f"{tried.how}: the result is not that of its values")] if wrong else []

    calls = {}
    for start, matrices in drawn:
        for operand, (words, laid) in product(range(len(matrices)), _LAID.items()):
            how = f"the {_ORDINALS[operand]} argument {words}"
            calls[start._replace(how=how)] = matrices, operand, laid
    yield from _check_each(auditor, calls, look)


def _slice_memory(x: Tensor) -> Tensor:
    shifted = torch.cat((x[1:], x[:1]))
    return torch.cat((shifted, x, shifted), -1)[..., x.shape[-1] : 2 * x.shape[-1]]


def _transpose_memory(x: Tensor) -> Tensor:
    """Returns a transposed layout of the same values: of a matrix, or of positions and heads."""
    sides = (1, 2) if x.dim() > 2 else (0, 1)
    return x.transpose(*sides).contiguous().transpose(*sides)


_LAID = {"as columns of a wider one": _slice_memory, "as a transposed one": _transpose_memory}


def _odd_shapes(auditor: Auditor) -> Iterator[AuditFinding]:
    """Tries sizes that do not fill whole tiles."""

    def look(tried: AuditInput) -> list[AuditFinding]:
        problems = auditor.problems(tried).items()
        return [auditor.finding(tried, name, verdict) for name, verdict in problems if verdict.failed]

    kinds = [data for data in (NORMAL, BLOCKS) if data in auditor.subject.data]
    yield from _check_each(auditor, [AuditInput(*start) for start in product(kinds, auditor.subject.odd)], look)


# The checks of values, in the order in which they run.
VALUE_CHECKS = (
    AuditCheck("numbers", _numbers, decides=True),
    AuditCheck("relations", _relations, frozenset(_CHANGES), needs_sound=True),
    AuditCheck("memory", _memory),
    AuditCheck("backward", _backward, frozenset({AuditKind.LINEAR}), needs_sound=True),
    AuditCheck("special values", _special_values),
    AuditCheck("odd shapes", _odd_shapes, needs_sound=True),
    AuditCheck("strides", _strides, needs_sound=True),
    AuditCheck("sizes", _sizes, needs_sound=True),
    AuditCheck("extremes", _extremes, needs_sound=True),
)
