"""Checks of results: of numbers, and of calls that everyday tests do not make: again, at other addresses, with numbers
that are not finite, and with sizes and layouts that nobody tries."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from fp8bench.features.audit.auditor import NORMAL, AuditCheck, AuditInput, Auditor
from fp8bench.features.audit.promises import Matrices
from fp8bench.features.audit.subjects import OptimizerSubject, Subject
from fp8bench.features.audit.values import AuditFinding, fail, remark
from fp8bench.model.promises import AuditKind
from fp8bench.user_code import own_words

BLOCKS, BLOCK = "blocks of different sizes", 128
_ORDINALS = ("first", "second", "third")
# The dimensions that are exchanged in a matrix, and in one with heads.
_SIDES = (0, 1), (1, 2)
Results = dict[str, Tensor]


def _numbers(auditor: Auditor) -> Iterator[AuditFinding]:
    """Holds the results on every shape and kind of data against the promise. Yields the first failure of each result,
    and each remark once."""
    reported: set[tuple[str, str]] = set()
    for shape in auditor.shapes():
        for data in auditor.subject.data:
            auditor.given = given = AuditInput(data, shape)
            for name, verdict in auditor.problems(given).items():
                key = name, verdict.code if verdict.remark else "failed"
                if key not in reported:
                    reported.add(key)
                    yield auditor.finding(given, name, verdict)
        if any(code == "failed" for _, code in reported):
            return


def _many_steps(auditor: Auditor) -> Iterator[AuditFinding]:
    """Takes many steps of an optimizer: a count that stands still, or updates that are lost, show late."""
    auditor.given = given = AuditInput(NORMAL, OptimizerSubject.many)
    for name, verdict in auditor.problems(given).items():
        yield auditor.finding(given, name, verdict)


class Relation(NamedTuple):
    """`given` changes the matrices; `wanted` says what the old result has to become then."""

    words: str
    given: Callable[..., Matrices]
    wanted: Callable[[Tensor], Tensor] = lambda y: y


def _flipped(dimension: int, *matrices: Tensor) -> Matrices:
    return tuple(matrix.flip(dimension).contiguous() for matrix in matrices)


_PLACES = "keys and values in another order"
_SHARED = (
    Relation("the first operand doubled", lambda a, *rest: (a * 2, *rest), lambda y: y * 2),
    Relation("the first operand negated", lambda a, *rest: (-a, *rest), lambda y: -y),
    Relation("rows in another order", lambda a, *rest: (*_flipped(0, a), *rest), lambda y: y.flip(0)),
)
_RELATIONS = {
    AuditKind.PRODUCT: (
        *_SHARED,
        Relation("the second operand halved", lambda a, b: (a, b / 2), lambda y: y / 2),
        Relation("the second operand's rows in another order", lambda a, b: (a, *_flipped(0, b)), lambda y: y.flip(1)),
        Relation(
            "blocks of the contraction in another order",
            lambda *ab: tuple(side.roll(BLOCK, 1).contiguous() for side in ab),
        ),
    ),
    AuditKind.CAST: _SHARED,
    AuditKind.ATTENTION: (
        Relation("queries and keys negated", lambda q, k, v: (-q, -k, v)),
        Relation("values doubled", lambda q, k, v: (q, k, v * 2), lambda y: y * 2),
        Relation("heads in another order", lambda *qkv: _flipped(1, *qkv), lambda y: y.flip(1)),
        Relation("batches in another order", lambda *qkv: _flipped(0, *qkv), lambda y: y.flip(0)),
        Relation(_PLACES, lambda q, k, v: (q, *_flipped(2, k, v))),
    ),
    AuditKind.OPTIMIZER: (
        Relation("gradients and weights negated", lambda *both: tuple(-side for side in both), lambda y: -y),
    ),
}


def _relations(auditor: Auditor) -> Iterator[AuditFinding]:
    """Checks what has to hold in any precision: if operands are doubled or permuted, results must follow."""
    subject, given = auditor.subject, auditor.first
    if subject.kind in (AuditKind.PRODUCT, AuditKind.CAST):
        given = AuditInput(BLOCKS, auditor.fitting(given.shape._replace(k=2 * BLOCK)))
    auditor.given, matrices = given, auditor.matrices(given)
    base = auditor.results(matrices)
    for words, change, wanted in _RELATIONS[subject.kind]:
        if subject.signature.causal and words == _PLACES:
            continue
        auditor.given, changed = given._replace(how=words), change(*matrices)
        promises, results = subject.promises(changed), auditor.results(changed)
        auditor.tried += len(results)
        for name, result in results.items():
            if result.shape != base[name].shape or not promises[name].agrees(result, wanted(base[name])):
                yield fail("relation", f"{words}: the result does not follow")


_OTHER = "uniform"
# A loop of timing is imitated by so many calls, or by those that fit into so many seconds.
_CALLS, _LONGEST = 110, 2.0
_POISONED = 4
# Tens of milliseconds: a kernel that does not wait for a stream so busy reads its inputs too early.
_BUSY_CYCLES = 100_000_000


def _memory(auditor: Auditor) -> Iterator[AuditFinding]:
    """Calls the kernel again and again, and changes what lies around it."""
    auditor.given = auditor.first
    arguments = auditor.subject.arguments(auditor.matrices(auditor.first))
    looks = [_changed, _overwritten]
    if auditor.sound:
        looks += [_stale, _keyed, _poisoned, _late, _repeated, _other_stream]
    for look in looks:
        yield from look(auditor, arguments)


def _changed(auditor: Auditor, arguments: Matrices) -> Iterator[AuditFinding]:
    before = [argument.detach().clone() for argument in arguments]
    auditor.subject.results(arguments)
    for place, pair in enumerate(zip(arguments, before, strict=True), 1):
        now, then = (tensor.detach().contiguous().view(-1).view(torch.uint8) for tensor in pair)
        if not torch.equal(now, then):
            yield fail("input-changed", f"argument {place} is not as it was before the call")
            return


def _stale(auditor: Auditor, arguments: Matrices) -> Iterator[AuditFinding]:
    """Writes new values where others were: a kernel that remembers results by address gives old ones."""
    auditor.subject.results(arguments)
    fresh = _refilled(auditor, arguments, _OTHER)
    if auditor.is_wrong(fresh, auditor.subject.results(arguments)):
        yield fail("stale", "other values at the same addresses: the result is not theirs")


def _keyed(auditor: Auditor, arguments: Matrices) -> Iterator[AuditFinding]:
    """Changes all but the outer rows and columns: a kernel that knows inputs by a few values gives old results."""
    base = _refilled(auditor, arguments, NORMAL)
    auditor.subject.results(arguments)
    fresh = _drawn(auditor, _OTHER)
    for tensor, old in zip(fresh, base, strict=True):
        rows, kept = (matrix.view(-1, matrix.shape[-1]) for matrix in (tensor, old))
        rows[0], rows[:, 0], rows[-1], rows[:, -1] = kept[0], kept[:, 0], kept[-1], kept[:, -1]
    if auditor.is_wrong(fresh, auditor.results(fresh)):
        yield fail("keyed", "all but the first and last rows and columns changed: old results")


def _overwritten(auditor: Auditor, arguments: Matrices) -> Iterator[AuditFinding]:
    first = auditor.subject.raw(arguments)
    kept = {name: tensor.detach().clone() for name, tensor in first.items()}
    _refilled(auditor, arguments, "rows of different sizes")
    auditor.subject.raw(arguments)
    pairs = [(first[name], tensor) for name, tensor in kept.items()]
    if not all(bool(((tensor == two) | (tensor.isnan() & two.isnan())).all()) for tensor, two in pairs):
        yield fail("overwritten", "a later call writes into the result of an earlier one")


def _poisoned(auditor: Auditor, arguments: Matrices) -> Iterator[AuditFinding]:
    """Fills results that were given back, and so the memory that the allocator hands out again, with NaN."""
    fresh = _refilled(auditor, arguments, NORMAL)
    for _ in range(_POISONED):
        for tensor in auditor.subject.raw(arguments).values():
            tensor.detach().fill_(math.nan)
        if auditor.is_wrong(fresh, auditor.subject.results(arguments)):
            yield fail("uninitialised", "after results were filled with NaN the next is wrong")
            return


def _late(auditor: Auditor, arguments: Matrices) -> Iterator[AuditFinding]:
    """Gives other values after a loop of calls such as a timing."""
    end, calls = time.monotonic() + _LONGEST, 0
    while calls < _CALLS and time.monotonic() < end:
        auditor.subject.raw(arguments)
        calls += 1
    fresh = _refilled(auditor, arguments, "outliers along the contraction")
    if auditor.is_wrong(fresh, auditor.subject.results(arguments)):
        yield fail("late", f"after {calls} calls with the same arguments results are wrong")


def _repeated(auditor: Auditor, arguments: Matrices) -> Iterator[AuditFinding]:
    """Asks for the same bits at other addresses. Others that are right get a remark: sums in another order."""
    fresh = _refilled(auditor, arguments, NORMAL)
    here, there = auditor.subject.results(arguments), auditor.results(fresh)
    if all(torch.equal(here[name], tensor) for name, tensor in there.items()):
        return
    if auditor.is_wrong(fresh, there):
        yield fail("address", "the same values at other addresses: the result is wrong")
    else:
        yield remark("not-repeatable", "the same values do not always give the same bits")


def _other_stream(auditor: Auditor, arguments: Matrices) -> Iterator[AuditFinding]:
    """On a GPU, writes the inputs late on a stream of its own, and calls the kernel on that stream behind them."""
    fresh = _drawn(auditor, _OTHER)
    arguments_there, late = auditor.subject.arguments(_drawn(auditor, NORMAL)), auditor.subject.arguments(fresh)
    with beside(auditor.subject.device) as there:
        if not there:
            return
        _write(late, arguments_there)
        results = auditor.subject.results(arguments_there)
    if auditor.is_wrong(fresh, results):
        yield fail("stream", "on its caller's stream it does not wait for what went before")


def _drawn(auditor: Auditor, data: str) -> Matrices:
    return auditor.matrices(auditor.first._replace(data=data))


def _refilled(auditor: Auditor, arguments: Matrices, data: str) -> Matrices:
    fresh = _drawn(auditor, data)
    _write(auditor.subject.arguments(fresh), arguments)
    return fresh


def _write(values: Matrices, into: Matrices) -> None:
    with torch.no_grad():
        for tensor, other in zip(into, values, strict=True):
            tensor.copy_(other)


@contextmanager
def beside(device: str) -> Iterator[bool]:
    """The body's work goes to a stream of its own, which is busy at first; yields False where the device has none."""
    if not device.startswith("cuda"):
        yield False
        return
    torch.cuda.synchronize(device)
    side = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    with torch.cuda.stream(side):
        torch.cuda._sleep(_BUSY_CYCLES)  # type: ignore[no-untyped-call]
        yield True
        side.synchronize()


Trial = tuple[str, Matrices, Callable[[Results], bool], str, str]


def _special_values(auditor: Auditor) -> Iterator[AuditFinding]:
    """A NaN or infinity must not become an ordinary number, nor zeros anything else. Yields each code once."""
    given, reported = auditor.first, set[str]()
    for how, matrices, is_wrong, code, why in _special(auditor, auditor.matrices(given)):
        auditor.given = given._replace(how=how) if how else given._replace(data="zeros")
        try:
            results = auditor.results(matrices)
            auditor.tried += len(results)
        except Exception as error:  # noqa: BLE001 - foreign code may raise anything
            finding = remark("raises", f"{how or 'zeros'}: {type(error).__name__}")
        else:
            finding = fail(code, f"{how}: {why}" if how else why)
            if not is_wrong(results):
                continue
        if finding.code not in reported:
            reported.add(finding.code)
            yield finding


def _special(auditor: Auditor, matrices: Matrices) -> Iterator[Trial]:
    """Yields what was done to the matrices, these, whether results are wrong, and a code and words if they are."""
    subject, (first, *rest) = auditor.subject, matrices
    tiny = first * torch.finfo(first.dtype).smallest_normal / 4
    zeros = subject.zeroed(matrices)
    yield "", zeros, lambda results: bool((_first(results) != 0).any()), "zeros", "zeros gave other numbers"
    yield "subnormal numbers", (tiny, *rest), _not_finite, "subnormal", "what came out is not finite"
    for operand, matrix in enumerate(matrices[: 1 if subject.kind is AuditKind.OPTIMIZER else None]):
        last = matrix.numel() - 1
        for index in (0, (last - matrix.shape[-1]) // 2, last):
            row, column = divmod(index, matrix.shape[-1])
            where = f"in the {_ORDINALS[operand]} argument's row {row}, column {column}"
            nan, infinity, zero = (_set(matrices, operand, index, number) for number in (math.nan, math.inf, 0.0))
            is_lost = partial(_nan_lost, subject, operand=operand, row=row)
            yield f"a NaN {where}", nan, is_lost, "nan-lost", "what it goes into is all numbers"
            is_lost = partial(_infinity_lost, subject, operand=operand, row=row, zero=zero)
            yield f"an infinity {where}", infinity, is_lost, "infinity-lost", "results are those of a zero"


def _reached(subject: Subject, results: Results, operand: int, row: int) -> Tensor:
    """Returns the results that a row of an operand goes into."""
    kind, names = subject.kind, list(results)
    result = results[names[operand == 2 and kind is AuditKind.LINEAR]]
    result = result.reshape(-1, result.shape[-1])
    if kind in (AuditKind.PRODUCT, AuditKind.LINEAR) and operand == 1:
        return result[:, row]
    return result[row] if kind is AuditKind.LINEAR or (operand == 0 and kind is not AuditKind.OPTIMIZER) else result


def _nan_lost(subject: Subject, results: Results, operand: int, row: int) -> bool:
    return not bool(_reached(subject, results, operand, row).isnan().any())


def _infinity_lost(subject: Subject, results: Results, operand: int, row: int, zero: Matrices) -> bool:
    """An infinity may become the largest number, or NaN, but must not count as a zero."""
    if subject.kind not in (AuditKind.PRODUCT, AuditKind.CAST, AuditKind.LINEAR):
        return False
    if not bool(_reached(subject, results, operand, row).isfinite().all()):
        return False
    promises = subject.promises(zero)
    return not any(promises[name].judge(result, search=False).failed for name, result in results.items())


def _first(results: Results) -> Tensor:
    return next(iter(results.values()))


def _not_finite(results: Results) -> bool:
    return not bool(_first(results).isfinite().all())


def _replaced(matrices: Matrices, operand: int, tensor: Tensor) -> Matrices:
    return *matrices[:operand], tensor, *matrices[operand + 1 :]


def _set(matrices: Matrices, operand: int, index: int, number: float) -> Matrices:
    changed = matrices[operand].clone()
    changed.view(-1)[index] = number
    return _replaced(matrices, operand, changed)


def _extremes(auditor: Auditor) -> Iterator[AuditFinding]:
    """Sizes that tests leave out: values far from one, tall and long matrices, and rows of zeros among others."""
    subject = auditor.subject
    for given, whole in _far(auditor):
        auditor.given, matrices = given, whole
        results = auditor.results(whole)
        if given.shape == auditor.fitting(subject.tall) and subject.kind is not AuditKind.ATTENTION:
            # To save time, only some rows are judged: those beside the ends of blocks of 16, and those with the
            # largest numbers, which decide scales.
            high = (whole[0], *whole[2:])
            count, largest = len(high[0]), [int(matrix.abs().amax(1).argmax()) for matrix in high]
            rows = sorted({*range(0, count, 16), *(end - 1 for end in range(16, count, 16)), count - 1, *largest})
            results = {name: result[rows] for name, result in results.items() if name != "weight gradient"}
            matrices = tuple(matrix if place == 1 else matrix[rows] for place, matrix in enumerate(whole))
        for name, verdict in auditor.judge(matrices, results, search=False).items():
            if verdict.failed:
                yield replace(verdict, why=f"{name}: {verdict.why}")
                return


def _far(auditor: Auditor) -> Iterator[tuple[AuditInput, Matrices]]:
    subject, given = auditor.subject, auditor.first
    matrices = auditor.matrices(given)
    # Only operands with scales can be far from one, and not in fp16. In attention the values alone: queries and
    # keys of another size are another softmax.
    operands = (2,) if subject.kind is AuditKind.ATTENTION else range(len(matrices))
    for operand in operands if matrices[0].dtype is not torch.float16 and subject.is_scaled else ():
        for power in (40, -40):
            how = f"the {_ORDINALS[operand]} argument times 2^{power}"
            yield given._replace(how=how), _replaced(matrices, operand, matrices[operand] * 2.0**power)
    empty = tuple(matrix.clone() for matrix in matrices)
    for matrix in empty:
        matrix.view(-1, matrix.shape[-1])[1] = 0
        matrix.view(-1, matrix.shape[-1])[2, :BLOCK] = 0
    yield given._replace(how="a row and a block of zeros in each argument"), empty
    tall = given._replace(shape=auditor.fitting(subject.tall), how="the largest in the last rows")
    large = auditor.matrices(tall)
    for matrix in large:
        matrix.view(-1, matrix.shape[-1])[-1, -8:] *= 16
    yield tall, large
    if "signs that lean" in subject.data:
        signs = AuditInput("signs that lean", tall.shape)
        yield signs, auditor.matrices(signs)


def _strides(auditor: Auditor) -> Iterator[AuditFinding]:
    """Matrices that are slices of others, or lie transposed: the result must be right, or the call refused."""
    subject, matrices, refused = auditor.subject, auditor.matrices(auditor.first), ""
    for operand in range(min(len(matrices), len(subject.sides))):
        for words, laid in _LAID.items():
            arguments, how = subject.arguments(matrices), f"the {_ORDINALS[operand]} argument {words}"
            auditor.given = auditor.first._replace(how=how)
            try:
                moved = laid(arguments[operand].detach()).requires_grad_(arguments[operand].requires_grad)
                results = subject.results(_replaced(arguments, operand, moved))
            except Exception as error:  # noqa: BLE001 - it may refuse
                refused = refused or f"{how}: {own_words(error)}"
                continue
            if any(verdict.failed for verdict in auditor.judge(matrices, results, search=False).values()):
                yield fail("strides", f"{how}: the result is not that of its values")
                return
    auditor.given = auditor.first
    if refused:
        yield remark("refused", refused)


def _wider(x: Tensor) -> Tensor:
    other = torch.cat((x[1:], x[:1]))
    return torch.cat((other, x, other), -1)[..., x.shape[-1] : 2 * x.shape[-1]]


_LAID: dict[str, Callable[[Tensor], Tensor]] = {
    "as columns of a wider one": _wider,
    "as a transposed one": lambda x: x.transpose(*_SIDES[x.dim() > 2]).contiguous().transpose(*_SIDES[x.dim() > 2]),
}


def _odd_shapes(auditor: Auditor) -> Iterator[AuditFinding]:
    """Sizes that fill no whole tile: the result must be right, or the call refused."""
    subject, refused = auditor.subject, list[AuditFinding]()
    for shape in subject.odd:
        for data in (NORMAL, BLOCKS) if BLOCKS in subject.data else (NORMAL,):
            auditor.given = given = AuditInput(data, shape)
            try:
                problems = auditor.problems(given)
            except Exception as error:  # noqa: BLE001 - it may refuse
                refused.append(auditor.about(given, remark("refused", own_words(error))))
                break
            for name in (name for name, verdict in problems.items() if verdict.failed):
                yield auditor.finding(given, name, problems[name])
                return
    if refused:
        first = refused[0]
        why = f"{len(refused)} of {len(subject.odd)} sizes are refused: {first.why}"
        yield replace(first, why=why, input=first.input.partition(",")[0])


_NOT_OPTIMIZERS = frozenset(AuditKind) - {AuditKind.OPTIMIZER}
# The checks that look at values, in the order in which they run.
VALUE_CHECKS = (
    AuditCheck("numbers", _numbers, decides=True),
    AuditCheck("many steps", _many_steps, frozenset({AuditKind.OPTIMIZER}), needs_sound=True),
    AuditCheck("relations", _relations, frozenset(_RELATIONS)),
    AuditCheck("memory", _memory),
    AuditCheck("special values", _special_values),
    AuditCheck("odd shapes", _odd_shapes, needs_sound=True),
    AuditCheck("strides", _strides, _NOT_OPTIMIZERS, needs_sound=True),
    AuditCheck("extremes", _extremes, _NOT_OPTIMIZERS, needs_sound=True),
)
