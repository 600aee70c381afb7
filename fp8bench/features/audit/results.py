"""Whether results are those of the promised precision, on data in which one mistake or another shows.

And whether they come from what goes in, this time: nothing remembered, overwritten or read that nobody wrote.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor

from fp8bench.features.audit.auditor import NORMAL, AuditCheck, AuditInput
from fp8bench.features.audit.promises import Matrices
from fp8bench.features.audit.subjects import OptimizerSubject
from fp8bench.features.audit.values import AuditFinding
from fp8bench.model.promises import AuditKind

BLOCKS, BLOCK = "blocks of different sizes", 128
# Of an optimizer's state: scales, and the count of steps, beside the moments.
_MORE = 1.05


class NumbersCheck(AuditCheck):
    """The check that the others rest on."""

    name = "numbers"
    grounds = True

    def look(self) -> Iterator[AuditFinding]:
        """The first failure of each result; each remark once."""
        said: set[tuple[str, str]] = set()
        for shape in self.auditor.shapes():
            for data in self.subject.data:
                self.given = AuditInput(data, shape)
                for name, verdict in self.auditor.wrong(self.given).items():
                    key = name, verdict.code if verdict.remark else "failed"
                    if key not in said:
                        said.add(key)
                        yield self.judged(self.given, name, verdict)
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
        for name, verdict in self.auditor.wrong(self.given).items():
            yield self.judged(self.given, name, verdict)
        few = AuditInput(NORMAL, self.subject.held)
        state = self.subject.state_bytes(self.auditor.matrices(few))
        if state is not None and state[0] > _MORE * state[1]:
            why = f"its state takes {state[0]:.3g} bytes an element, and {state[1]:.3g} were promised"
            yield self.remark("state-bytes", why, few)


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
        "blocks of the contraction in another order", lambda *ab: tuple(one.roll(BLOCK, 1).contiguous() for one in ab)
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
# What is timed is called so often before anybody looks again, or for so many seconds.
_CALLS, _LONGEST = 110, 2.0
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
        for tensor, old in zip(fresh, base, strict=True):
            rows, kept = (matrix.view(-1, matrix.shape[-1]) for matrix in (tensor, old))
            rows[0], rows[:, 0], rows[-1], rows[:, -1] = kept[0], kept[:, 0], kept[-1], kept[:, -1]
        if self._wrong(fresh, self.auditor.results(fresh)):
            yield self.fail("keyed", "all but the first and last rows and columns changed: old results")

    def _overwritten(self, arguments: Matrices) -> Iterator[AuditFinding]:
        """A result is the caller's: a later call must not write into it."""
        first = self.subject.raw(arguments)
        kept = {name: tensor.detach().clone() for name, tensor in first.items()}
        self._refilled(arguments, "rows of different sizes")
        self.subject.raw(arguments)
        pairs = [(first[name], tensor) for name, tensor in kept.items()]
        if not all(bool(((tensor == two) | (tensor.isnan() & two.isnan())).all()) for tensor, two in pairs):
            yield self.fail("overwritten", "a later call writes into the result of an earlier one")

    def _poisoned(self, arguments: Matrices) -> Iterator[AuditFinding]:
        """Memory that comes back from the allocator, and results that were given back, are full of NaN."""
        fresh = self._refilled(arguments, NORMAL)
        for _ in range(_POISONED):
            for tensor in self.subject.raw(arguments).values():
                tensor.detach().fill_(math.nan)
            if self._wrong(fresh, self.subject.results(arguments)):
                yield self.fail("uninitialised", "after results were filled with NaN the next is wrong")
                return

    def _late(self, arguments: Matrices) -> Iterator[AuditFinding]:
        """After a loop as it is timed, with values that it has not seen."""
        end, calls = time.monotonic() + _LONGEST, 0
        while calls < _CALLS and time.monotonic() < end:
            self.subject.raw(arguments)
            calls += 1
        fresh = self._refilled(arguments, "outliers along the contraction")
        if self._wrong(fresh, self.subject.results(arguments)):
            yield self.fail("late", f"after {calls} calls with the same arguments results are wrong")

    def _repeated(self, arguments: Matrices) -> Iterator[AuditFinding]:
        """At another address the same bits; a remark where sums are in another order each time."""
        fresh = self._refilled(arguments, NORMAL)
        here, there = self.subject.results(arguments), self.auditor.results(fresh)
        if all(torch.equal(here[name], tensor) for name, tensor in there.items()):
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
        return any(verdict.failed for verdict in self.auditor.judged(matrices, results).values())

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
        for tensor, other in zip(into, values, strict=True):
            tensor.copy_(other)


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


CHECKS: tuple[type[AuditCheck], ...] = (NumbersCheck, ManyStepsCheck, RelationsCheck, MemoryCheck)
