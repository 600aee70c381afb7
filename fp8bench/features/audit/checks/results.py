"""Whether results are those of the promised precision, on data in which one mistake or another shows.

And whether they come from what goes in, this time: nothing remembered, overwritten or read that nobody wrote.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor

from fp8bench.features.audit.checks.auditor import NORMAL, AuditCheck, AuditInput
from fp8bench.features.audit.promises import Matrices
from fp8bench.features.audit.subjects import OptimizerSubject
from fp8bench.features.audit.values import AuditFinding, AuditOutcome
from fp8bench.model.promises import AuditKind
from fp8bench.user_code import own_words

_BLOCKS, _BLOCK = "blocks of different sizes", 128
# Of an optimizer's state: scales, and the count of steps, beside the moments.
_MORE = 1.05


class NumbersCheck(AuditCheck):
    """The check that the others rest on."""

    name = "numbers"

    def look(self) -> Iterator[AuditFinding]:
        """The first failure of each result; each remark once."""
        said: set[tuple[str, str]] = set()
        for shape in self.auditor.shapes():
            for data in self.subject.data:
                self.given = AuditInput(data, shape)
                for name, one in self.auditor.wrong(self.given).items():
                    key = name, one.code if one.remark else "failed"
                    if key not in said:
                        said.add(key)
                        yield self.judged(self.given, name, one)
            if any(code == "failed" for _, code in said):
                return


class ManyStepsCheck(AuditCheck):
    """Counts that stand still, and updates that are lost, show late."""

    name = "many steps"

    def applies(self) -> bool:
        return self.auditor.sound and isinstance(self.subject, OptimizerSubject)

    def look(self) -> Iterator[AuditFinding]:
        assert isinstance(self.subject, OptimizerSubject)
        self.given = AuditInput(NORMAL, self.subject.many)
        for name, one in self.auditor.wrong(self.given).items():
            yield self.judged(self.given, name, one)
        few = AuditInput(NORMAL, self.subject.held)
        state = self.subject.state_bytes(self.auditor.matrices(few))
        if state is not None and state[0] > _MORE * state[1]:
            why = f"its state takes {state[0]:.3g} bytes an element, and {state[1]:.3g} were promised"
            yield self.remark("state-bytes", why, few)


class SpecialValuesCheck(AuditCheck):
    """A number that is none must not become one."""

    name = "special values"

    def look(self) -> list[AuditFinding]:
        given = AuditInput(NORMAL, self.auditor.shapes()[0])
        first, *rest = self.auditor.matrices(given)
        nan, infinity = first.clone(), first.clone()
        nan.view(-1)[0], infinity.view(-1)[0] = math.nan, math.inf
        tiny = first * torch.finfo(first.dtype).smallest_normal / 4
        cases = (
            (given._replace(how="a NaN in the first row"), (nan, *rest), self._nan),
            (given._replace(how="an infinity in the first row"), (infinity, *rest), self._infinity),
            (given._replace(data="zeros"), self.subject.zeroed((first, *rest)), self._zeros),
            (given._replace(how="subnormal numbers"), (tiny, *rest), self._tiny),
        )
        return [finding for case in cases for finding in self._looked(*case)]

    def _looked(
        self, given: AuditInput, matrices: Matrices, looks: Callable[[Tensor, AuditInput], Iterator[AuditFinding]]
    ) -> Iterator[AuditFinding]:
        try:
            results = self.auditor.results(matrices)
        except Exception as error:  # noqa: BLE001 - foreign code may raise anything
            yield self.remark("raises", f"{given.how or given.data}: {type(error).__name__}", given)
            return
        self.auditor.tried += len(results)
        result = next(iter(results.values()))
        yield from looks(result.reshape(-1, result.shape[-1]), given)

    def _nan(self, result: Tensor, given: AuditInput) -> Iterator[AuditFinding]:
        if not bool(result[0].isnan().any()):
            yield self.fail("nan-lost", "a NaN went in, and its row is all numbers", given)
        elif bool(result[1:].isnan().any()):
            yield self.remark("nan-spreads", "a NaN takes other rows along", given)

    def _infinity(self, result: Tensor, given: AuditInput) -> Iterator[AuditFinding]:
        if bool((~result[1:].isfinite()).any()):
            yield self.remark("infinity-spreads", "an infinity takes other rows along", given)
        elif not bool(result[1:].any()):
            yield self.remark("infinity-spreads", "an infinity makes all other rows zero", given)

    def _zeros(self, result: Tensor, given: AuditInput) -> Iterator[AuditFinding]:
        if not bool((result == 0).all()):
            yield self.fail("zeros", f"zeros went in, and {float(result.flatten()[0]):g} came out", given)

    def _tiny(self, result: Tensor, given: AuditInput) -> Iterator[AuditFinding]:
        if not bool(result.isfinite().all()):
            yield self.fail("subnormal", "subnormal numbers went in, and what came out are no numbers", given)


class OddShapesCheck(AuditCheck):
    """Tiles are whole, and matrices are not."""

    name = "odd shapes"

    def applies(self) -> bool:
        return self.auditor.sound

    def look(self) -> Iterator[AuditFinding]:
        refused: list[str] = []
        why = ""
        for shape in self.subject.odd:
            for data in (NORMAL, _BLOCKS) if _BLOCKS in self.subject.data else (NORMAL,):
                given = AuditInput(data, shape)
                try:
                    found = [(name, one) for name, one in self.auditor.wrong(given).items() if one.failed]
                except Exception as error:  # noqa: BLE001 - a refusal is what a size that does not divide may get
                    refused.append(self.auditor.words(given).partition(",")[0])
                    why = why or own_words(error)
                    break
                if found:
                    yield self.judged(given, *found[0])
                    return
        if refused:
            why = f"{len(refused)} of {len(self.subject.odd)} sizes are refused: {why}"
            yield AuditFinding(self.name, AuditOutcome.PASS, "refused", why, refused[0])


class Relation(NamedTuple):
    """What is done to the matrices, and what a result has to become then."""

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
        "blocks of the contraction in another order", lambda *ab: tuple(one.roll(_BLOCK, 1).contiguous() for one in ab)
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
    """What has to hold whatever the precision."""

    name = "relations"

    def applies(self) -> bool:
        return self.subject.kind is not AuditKind.LINEAR

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
            self.given = AuditInput(_BLOCKS, self.auditor.fitting(shape._replace(k=2 * _BLOCK)))
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
# What is timed is called so often before anybody looks again.
_CALLS = 40
_POISONED = 4
# Tens of milliseconds: whoever does not wait for a stream that is busy so long has read too early.
_BUSY_CYCLES = 100_000_000


class MemoryCheck(AuditCheck):
    """Calls it again and again, and changes what lies around it."""

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
        """What it was given must be as it was."""
        before = [argument.detach().clone() for argument in arguments]
        self.subject.results(arguments)
        for place, pair in enumerate(zip(arguments, before, strict=True), 1):
            one, other = (tensor.detach().contiguous().view(-1).view(torch.uint8) for tensor in pair)
            if not torch.equal(one, other):
                yield self.fail("input-changed", f"argument {place} is not as it was before the call")
                return

    def _stale(self, arguments: Matrices) -> Iterator[AuditFinding]:
        """New values where others were: whoever remembers results by address gives the old ones."""
        self.subject.results(arguments)
        fresh = self._refilled(arguments, _OTHER)
        if self._wrong(fresh, self.subject.results(arguments)):
            yield self.fail("stale", "other values at the same addresses: the result is not theirs")

    def _keyed(self, arguments: Matrices) -> Iterator[AuditFinding]:
        """Other values but in the first row and column: whoever knows inputs by a few values gives old results."""
        base = self._refilled(arguments, NORMAL)
        self.subject.results(arguments)
        fresh = self._matrices(_OTHER)
        for one, old in zip(fresh, base, strict=True):
            rows, kept = (matrix.view(-1, matrix.shape[-1]) for matrix in (one, old))
            rows[0], rows[:, 0], rows[-1], rows[:, -1] = kept[0], kept[:, 0], kept[-1], kept[:, -1]
        if self._wrong(fresh, self.auditor.results(fresh)):
            yield self.fail("keyed", "all but the first and last rows and columns changed: old results")

    def _overwritten(self, arguments: Matrices) -> Iterator[AuditFinding]:
        """A result is the caller's: a later call must not write into it."""
        first = self.subject.raw(arguments)
        kept = {name: one.detach().clone() for name, one in first.items()}
        self._refilled(arguments, "rows of different sizes")
        self.subject.raw(arguments)
        if any(not torch.equal(first[name], one) and not _nan_alike(first[name], one) for name, one in kept.items()):
            yield self.fail("overwritten", "a later call writes into the result of an earlier one")

    def _poisoned(self, arguments: Matrices) -> Iterator[AuditFinding]:
        """Memory that comes back from the allocator, and results that were given back, are full of NaN."""
        fresh = self._refilled(arguments, NORMAL)
        for _ in range(_POISONED):
            for one in self.subject.raw(arguments).values():
                one.detach().fill_(math.nan)
            if self._wrong(fresh, self.subject.results(arguments)):
                yield self.fail("uninitialised", "after results were filled with NaN the next is wrong")
                return

    def _late(self, arguments: Matrices) -> Iterator[AuditFinding]:
        """After a loop as it is timed, with values that it has not seen."""
        for _ in range(_CALLS):
            self.subject.raw(arguments)
        fresh = self._refilled(arguments, "outliers along the contraction")
        if self._wrong(fresh, self.subject.results(arguments)):
            yield self.fail("late", f"after {_CALLS} calls with the same arguments results are wrong")

    def _repeated(self, arguments: Matrices) -> Iterator[AuditFinding]:
        """At another address the same bits; a remark where sums are in another order each time."""
        fresh = self._refilled(arguments, NORMAL)
        here, there = self.subject.results(arguments), self.auditor.results(fresh)
        if all(torch.equal(here[name], one) for name, one in there.items()):
            return
        if self._wrong(fresh, there):
            yield self.fail("address", "the same values at other addresses: the result is wrong")
        else:
            yield self.remark("not-repeatable", "the same values do not always give the same bits")

    def _other_stream(self, arguments: Matrices) -> Iterator[AuditFinding]:
        """Of a GPU: inputs that are written late on a stream of one's own, and a call on that stream behind them."""
        fresh = self._matrices(_OTHER)
        held, new = self.subject.arguments(self._matrices(NORMAL)), self.subject.arguments(fresh)
        with beside(self.subject.device) as there:
            if not there:
                return
            _write(new, held)
            results = self.subject.results(held)
        if self._wrong(fresh, results):
            yield self.fail("stream", "on its caller's stream it does not wait for what went before")

    def _wrong(self, matrices: Matrices, results: dict[str, Tensor]) -> bool:
        return any(one.failed for one in self.auditor.judged(matrices, results).values())

    def _matrices(self, data: str) -> Matrices:
        assert self.given is not None
        return self.auditor.matrices(self.given._replace(data=data))

    def _refilled(self, arguments: Matrices, data: str) -> Matrices:
        """Other data of the same shape, written where the arguments lie."""
        fresh = self._matrices(data)
        _write(self.subject.arguments(fresh), arguments)
        return fresh


def _write(values: Matrices, into: Matrices) -> None:
    with torch.no_grad():
        for one, other in zip(into, values, strict=True):
            one.copy_(other)


def _nan_alike(tensor: Tensor, other: Tensor) -> bool:
    return bool(((tensor == other) | (tensor.isnan() & other.isnan())).all())


@contextmanager
def beside(device: str) -> Iterator[bool]:
    """The body's work goes to a stream of its own, which is busy at first; False where a device has none."""
    if not device.startswith("cuda"):
        yield False
        return
    torch.cuda.synchronize(device)
    side = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    with torch.cuda.stream(side):
        torch.cuda._sleep(_BUSY_CYCLES)  # type: ignore[no-untyped-call]
        yield True
        side.synchronize()


CHECKS = (NumbersCheck, ManyStepsCheck, RelationsCheck, MemoryCheck, SpecialValuesCheck, OddShapesCheck)
