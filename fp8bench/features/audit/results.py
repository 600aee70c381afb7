"""Checks that call a kernel in ways that everyday tests do not: again, at other addresses, with numbers that are not
finite, and with sizes and layouts that nobody tries."""

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

from fp8bench.features.audit.auditor import NORMAL, AuditCheck, AuditInput, ManyStepsCheck, NumbersCheck
from fp8bench.features.audit.promises import Matrices
from fp8bench.features.audit.values import AuditFinding, AuditOutcome
from fp8bench.model.promises import AuditKind
from fp8bench.user_code import own_words

BLOCKS, BLOCK = "blocks of different sizes", 128
_ORDINALS = ("first", "second", "third")
# The dimensions that are exchanged in a matrix, and in one with heads.
_SIDES = (0, 1), (1, 2)
Results = dict[str, Tensor]


class Relation(NamedTuple):
    """`given` changes the matrices; `wanted` says what the old result has to become then."""

    words: str
    given: Callable[..., Matrices]
    wanted: Callable[[Tensor], Tensor] = lambda y: y


def _flipped(dimension: int, *matrices: Tensor) -> Matrices:
    return tuple(matrix.flip(dimension).contiguous() for matrix in matrices)


_SHARED = (
    Relation("the first operand doubled", lambda a, *rest: (a * 2, *rest), lambda y: y * 2),
    Relation("the first operand negated", lambda a, *rest: (-a, *rest), lambda y: -y),
    Relation("rows in another order", lambda a, *rest: (*_flipped(0, a), *rest), lambda y: y.flip(0)),
)
_OF_PRODUCTS = (
    Relation("the second operand halved", lambda a, b: (a, b / 2), lambda y: y / 2),
    Relation("the second operand's rows in another order", lambda a, b: (a, *_flipped(0, b)), lambda y: y.flip(1)),
    Relation(
        "blocks of the contraction in another order", lambda *ab: tuple(side.roll(BLOCK, 1).contiguous() for side in ab)
    ),
)
_OF_ATTENTION = (
    Relation("queries and keys negated", lambda q, k, v: (-q, -k, v)),
    Relation("values doubled", lambda q, k, v: (q, k, v * 2), lambda y: y * 2),
    Relation("heads in another order", lambda *qkv: _flipped(1, *qkv), lambda y: y.flip(1)),
    Relation("batches in another order", lambda *qkv: _flipped(0, *qkv), lambda y: y.flip(0)),
)
_NOT_CAUSAL = Relation("keys and values in another order", lambda q, k, v: (q, *_flipped(2, k, v)))
_OF_OPTIMIZERS = (Relation("gradients and weights negated", lambda *both: tuple(-side for side in both), lambda y: -y),)


class RelationsCheck(AuditCheck):
    """Checks what has to hold in any precision: if operands are doubled or permuted, results must follow."""

    name, kinds = "relations", frozenset(AuditKind) - {AuditKind.LINEAR}

    def look(self) -> Iterator[AuditFinding]:
        relations = {
            AuditKind.PRODUCT: _SHARED + _OF_PRODUCTS,
            AuditKind.CAST: _SHARED,
            AuditKind.ATTENTION: _OF_ATTENTION + (() if self.subject.signature.causal else (_NOT_CAUSAL,)),
            AuditKind.OPTIMIZER: _OF_OPTIMIZERS,
        }
        shape = self.auditor.shapes()[0]
        self.given = AuditInput(NORMAL, shape)
        if self.subject.kind in (AuditKind.PRODUCT, AuditKind.CAST):
            self.given = AuditInput(BLOCKS, self.auditor.fitting(shape._replace(k=2 * BLOCK)))
        matrices = self.auditor.matrices(self.given)
        base = self.auditor.results(matrices)
        for words, given, wanted in relations[self.subject.kind]:
            changed = given(*matrices)
            promises, results = self.subject.promises(changed), self.auditor.results(changed)
            self.auditor.tried += len(results)
            for name, result in results.items():
                if result.shape != base[name].shape or not promises[name].agrees(result, wanted(base[name])):
                    why = f"{words}: the result does not follow"
                    yield self.fail("relation", why, self.given._replace(how=words))


_OTHER = "uniform"
# A loop of timing is imitated by so many calls, or by those that fit into so many seconds.
_CALLS, _LONGEST = 110, 2.0
_POISONED = 4
# Tens of milliseconds: a kernel that does not wait for a stream so busy reads its inputs too early.
_BUSY_CYCLES = 100_000_000


class MemoryCheck(AuditCheck):
    """Calls the kernel again and again, and changes what lies around it."""

    name = "memory"

    def look(self) -> Iterator[AuditFinding]:
        self.given = AuditInput(NORMAL, self.auditor.shapes()[0])
        arguments = self.subject.arguments(self._matrices(NORMAL))
        looks = [self._changed, self._overwritten]
        if self.auditor.sound:
            looks += [self._stale, self._keyed, self._poisoned, self._late, self._repeated, self._other_stream]
        for look in looks:
            yield from look(arguments)

    def _changed(self, arguments: Matrices) -> Iterator[AuditFinding]:
        before = [argument.detach().clone() for argument in arguments]
        self.subject.results(arguments)
        for place, pair in enumerate(zip(arguments, before, strict=True), 1):
            now, then = (tensor.detach().contiguous().view(-1).view(torch.uint8) for tensor in pair)
            if not torch.equal(now, then):
                yield self.fail("input-changed", f"argument {place} is not as it was before the call")
                return

    def _stale(self, arguments: Matrices) -> Iterator[AuditFinding]:
        """Writes new values where others were: a kernel that remembers results by address gives old ones."""
        self.subject.results(arguments)
        fresh = self._refilled(arguments, _OTHER)
        if self._wrong(fresh, self.subject.results(arguments)):
            yield self.fail("stale", "other values at the same addresses: the result is not theirs")

    def _keyed(self, arguments: Matrices) -> Iterator[AuditFinding]:
        """Changes all but the outer rows and columns: a kernel that knows inputs by a few values gives old results."""
        base = self._refilled(arguments, NORMAL)
        self.subject.results(arguments)
        fresh = self._matrices(_OTHER)
        for tensor, old in zip(fresh, base, strict=True):
            rows, kept = (matrix.view(-1, matrix.shape[-1]) for matrix in (tensor, old))
            rows[0], rows[:, 0], rows[-1], rows[:, -1] = kept[0], kept[:, 0], kept[-1], kept[:, -1]
        if self._wrong(fresh, self.auditor.results(fresh)):
            yield self.fail("keyed", "all but the first and last rows and columns changed: old results")

    def _overwritten(self, arguments: Matrices) -> Iterator[AuditFinding]:
        first = self.subject.raw(arguments)
        kept = {name: tensor.detach().clone() for name, tensor in first.items()}
        self._refilled(arguments, "rows of different sizes")
        self.subject.raw(arguments)
        pairs = [(first[name], tensor) for name, tensor in kept.items()]
        if not all(bool(((tensor == two) | (tensor.isnan() & two.isnan())).all()) for tensor, two in pairs):
            yield self.fail("overwritten", "a later call writes into the result of an earlier one")

    def _poisoned(self, arguments: Matrices) -> Iterator[AuditFinding]:
        """Fills results that were given back, and so the memory that the allocator hands out again, with NaN."""
        fresh = self._refilled(arguments, NORMAL)
        for _ in range(_POISONED):
            for tensor in self.subject.raw(arguments).values():
                tensor.detach().fill_(math.nan)
            if self._wrong(fresh, self.subject.results(arguments)):
                yield self.fail("uninitialised", "after results were filled with NaN the next is wrong")
                return

    def _late(self, arguments: Matrices) -> Iterator[AuditFinding]:
        """Gives other values after a loop of calls such as a timing."""
        end, calls = time.monotonic() + _LONGEST, 0
        while calls < _CALLS and time.monotonic() < end:
            self.subject.raw(arguments)
            calls += 1
        fresh = self._refilled(arguments, "outliers along the contraction")
        if self._wrong(fresh, self.subject.results(arguments)):
            yield self.fail("late", f"after {calls} calls with the same arguments results are wrong")

    def _repeated(self, arguments: Matrices) -> Iterator[AuditFinding]:
        """Asks for the same bits at other addresses. Others that are right get a remark: sums in another order."""
        fresh = self._refilled(arguments, NORMAL)
        here, there = self.subject.results(arguments), self.auditor.results(fresh)
        if all(torch.equal(here[name], tensor) for name, tensor in there.items()):
            return
        if self._wrong(fresh, there):
            yield self.fail("address", "the same values at other addresses: the result is wrong")
        else:
            yield self.remark("not-repeatable", "the same values do not always give the same bits")

    def _other_stream(self, arguments: Matrices) -> Iterator[AuditFinding]:
        """On a GPU, writes the inputs late on a stream of its own, and calls the kernel on that stream behind them."""
        fresh = self._matrices(_OTHER)
        arguments_there, late = self.subject.arguments(self._matrices(NORMAL)), self.subject.arguments(fresh)
        with beside(self.subject.device) as there:
            if not there:
                return
            _write(late, arguments_there)
            results = self.subject.results(arguments_there)
        if self._wrong(fresh, results):
            yield self.fail("stream", "on its caller's stream it does not wait for what went before")

    def _wrong(self, matrices: Matrices, results: dict[str, Tensor]) -> bool:
        return any(verdict.failed for verdict in self.auditor.judge(matrices, results).values())

    def _matrices(self, data: str) -> Matrices:
        assert self.given is not None
        return self.auditor.matrices(self.given._replace(data=data))

    def _refilled(self, arguments: Matrices, data: str) -> Matrices:
        fresh = self._matrices(data)
        _write(self.subject.arguments(fresh), arguments)
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


class SpecialValuesCheck(AuditCheck):
    """A NaN or infinity must not become an ordinary number, nor zeros anything else."""

    name = "special values"

    def look(self) -> Iterator[AuditFinding]:
        """Yields each code once."""
        given, reported = AuditInput(NORMAL, self.auditor.shapes()[0]), set[str]()
        for how, matrices, is_wrong, code, why in self._trials(self.auditor.matrices(given)):
            about = given._replace(how=how) if how else given._replace(data="zeros")
            try:
                results = self.auditor.results(matrices)
                self.auditor.tried += len(results)
            except Exception as error:  # noqa: BLE001 - foreign code may raise anything
                finding = self.remark("raises", f"{how or 'zeros'}: {type(error).__name__}", about)
            else:
                finding = self.fail(code, f"{how}: {why}" if how else why, about)
                if not is_wrong(results):
                    continue
            if finding.code not in reported:
                reported.add(finding.code)
                yield finding

    def _trials(self, matrices: Matrices) -> Iterator[tuple[str, Matrices, Callable[[Results], bool], str, str]]:
        """Yields what was done to the matrices, these, whether results are wrong, and a code and words if they are."""
        first, *rest = matrices
        tiny = first * torch.finfo(first.dtype).smallest_normal / 4
        zeros = self.subject.zeroed(matrices)
        yield "", zeros, lambda results: bool((_first(results) != 0).any()), "zeros", "zeros gave other numbers"
        yield "subnormal numbers", (tiny, *rest), _not_finite, "subnormal", "what came out is not finite"
        for operand, matrix in enumerate(matrices[: 1 if self.subject.kind is AuditKind.OPTIMIZER else None]):
            last = matrix.numel() - 1
            for index in (0, (last - matrix.shape[-1]) // 2, last):
                row, column = divmod(index, matrix.shape[-1])
                where = f"in the {_ORDINALS[operand]} argument's row {row}, column {column}"
                nan, infinity, zero = (_set(matrices, operand, index, number) for number in (math.nan, math.inf, 0.0))
                is_lost = partial(self._nan_lost, operand=operand, row=row)
                yield f"a NaN {where}", nan, is_lost, "nan-lost", "what it goes into is all numbers"
                is_lost = partial(self._infinity_lost, operand=operand, row=row, zero=zero)
                yield f"an infinity {where}", infinity, is_lost, "infinity-lost", "results are those of a zero"

    def _reached(self, results: Results, operand: int, row: int) -> Tensor:
        """Returns the results that a row of an operand goes into."""
        kind, names = self.subject.kind, list(results)
        result = results[names[operand == 2 and kind is AuditKind.LINEAR]]
        result = result.reshape(-1, result.shape[-1])
        if kind in (AuditKind.PRODUCT, AuditKind.LINEAR) and operand == 1:
            return result[:, row]
        return result[row] if kind is AuditKind.LINEAR or (operand == 0 and kind is not AuditKind.OPTIMIZER) else result

    def _nan_lost(self, results: Results, operand: int, row: int) -> bool:
        return not bool(self._reached(results, operand, row).isnan().any())

    def _infinity_lost(self, results: Results, operand: int, row: int, zero: Matrices) -> bool:
        """An infinity may become the largest number, or NaN, but must not count as a zero."""
        if self.subject.kind not in (AuditKind.PRODUCT, AuditKind.CAST, AuditKind.LINEAR):
            return False
        if not bool(self._reached(results, operand, row).isfinite().all()):
            return False
        promises = self.subject.promises(zero)
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


class ExtremesCheck(AuditCheck):
    """Sizes that tests leave out: values far from one, tall and long matrices, and rows of zeros among others."""

    name, needs_sound, kinds = "extremes", True, frozenset(AuditKind) - {AuditKind.OPTIMIZER}

    def look(self) -> Iterator[AuditFinding]:
        for given, whole in self._cases():
            results, matrices = self.auditor.results(whole), whole
            if given.shape == self.auditor.fitting(self.subject.tall) and self.subject.kind is not AuditKind.ATTENTION:
                # To save time, only some rows are judged: those beside the ends of blocks of 16, and those with the
                # largest numbers, which decide scales.
                high = (whole[0], *whole[2:])
                count, largest = len(high[0]), [int(matrix.abs().amax(1).argmax()) for matrix in high]
                rows = sorted({*range(0, count, 16), *(end - 1 for end in range(16, count, 16)), count - 1, *largest})
                results = {name: result[rows] for name, result in results.items() if name != "weight gradient"}
                matrices = tuple(matrix if place == 1 else matrix[rows] for place, matrix in enumerate(whole))
            promises = self.subject.promises(matrices)
            self.auditor.tried += len(results)
            for name, result in results.items():
                verdict = promises[name].judge(result, search=False)
                if verdict.failed:
                    finding = self.fail(verdict.code, f"{name}: {verdict.why}", given)
                    yield replace(finding, error=verdict.error, expected=verdict.expected)
                    return

    def _cases(self) -> Iterator[tuple[AuditInput, Matrices]]:
        given = AuditInput(NORMAL, self.auditor.shapes()[0])
        matrices = self.auditor.matrices(given)
        # Only operands with scales can be far from one, and not in fp16. In attention the values alone: queries and
        # keys of another size are another softmax.
        operands = (2,) if self.subject.kind is AuditKind.ATTENTION else range(len(matrices))
        for operand in operands if matrices[0].dtype is not torch.float16 and self.subject.is_scaled else ():
            for power in (40, -40):
                how = f"the {_ORDINALS[operand]} argument times 2^{power}"
                yield given._replace(how=how), _replaced(matrices, operand, matrices[operand] * 2.0**power)
        empty = tuple(matrix.clone() for matrix in matrices)
        for matrix in empty:
            matrix.view(-1, matrix.shape[-1])[1] = 0
            matrix.view(-1, matrix.shape[-1])[2, :BLOCK] = 0
        yield given._replace(how="a row and a block of zeros in each argument"), empty
        tall = given._replace(shape=self.auditor.fitting(self.subject.tall), how="the largest in the last rows")
        large = self.auditor.matrices(tall)
        for matrix in large:
            matrix.view(-1, matrix.shape[-1])[-1, -8:] *= 16
        yield tall, large
        if "signs that lean" in self.subject.data:
            signs = AuditInput("signs that lean", tall.shape)
            yield signs, self.auditor.matrices(signs)


class StridesCheck(AuditCheck):
    """Matrices that are slices of others, or lie transposed: the result must be right, or the call refused."""

    name, needs_sound, kinds = "strides", True, frozenset(AuditKind) - {AuditKind.OPTIMIZER}

    def look(self) -> Iterator[AuditFinding]:
        given = AuditInput(NORMAL, self.auditor.shapes()[0])
        matrices = self.auditor.matrices(given)
        promises = self.subject.promises(matrices)
        refused = ""
        for operand in range(min(len(matrices), len(self.subject.sides))):
            for words, laid in _LAID.items():
                arguments = self.subject.arguments(matrices)
                about = given._replace(how=f"the {_ORDINALS[operand]} argument {words}")
                try:
                    moved = laid(arguments[operand].detach()).requires_grad_(arguments[operand].requires_grad)
                    results = self.subject.results(_replaced(arguments, operand, moved))
                except Exception as error:  # noqa: BLE001 - it may refuse
                    refused = refused or f"{about.how}: {own_words(error)}"
                    continue
                self.auditor.tried += len(results)
                if any(promises[name].judge(result, search=False).failed for name, result in results.items()):
                    yield self.fail("strides", f"{about.how}: the result is not that of its values", about)
                    return
        if refused:
            yield self.remark("refused", refused, given)


def _wider(x: Tensor) -> Tensor:
    other = torch.cat((x[1:], x[:1]))
    return torch.cat((other, x, other), -1)[..., x.shape[-1] : 2 * x.shape[-1]]


_LAID: dict[str, Callable[[Tensor], Tensor]] = {
    "as columns of a wider one": _wider,
    "as a transposed one": lambda x: x.transpose(*_SIDES[x.dim() > 2]).contiguous().transpose(*_SIDES[x.dim() > 2]),
}


class OddShapesCheck(AuditCheck):
    """Sizes that fill no whole tile: the result must be right, or the call refused."""

    name, needs_sound = "odd shapes", True

    def look(self) -> Iterator[AuditFinding]:
        refused: list[str] = []
        why = ""
        for shape in self.subject.odd:
            for data in (NORMAL, BLOCKS) if BLOCKS in self.subject.data else (NORMAL,):
                given = AuditInput(data, shape)
                try:
                    problems = self.auditor.problems(given)
                except Exception as error:  # noqa: BLE001 - it may refuse
                    refused.append(self.auditor.input_text(given).partition(",")[0])
                    why = why or own_words(error)
                    break
                for name in (name for name, verdict in problems.items() if verdict.failed):
                    yield self.finding(given, name, problems[name])
                    return
        if refused:
            why = f"{len(refused)} of {len(self.subject.odd)} sizes are refused: {why}"
            yield AuditFinding(self.name, AuditOutcome.PASS, "refused", why, refused[0])


# The checks that look at values, in the order in which they run.
VALUE_CHECKS: tuple[type[AuditCheck], ...] = (
    NumbersCheck,
    ManyStepsCheck,
    RelationsCheck,
    MemoryCheck,
    SpecialValuesCheck,
    OddShapesCheck,
    StridesCheck,
    ExtremesCheck,
)
