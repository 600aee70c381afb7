"""Whether results come from what goes in, this time: nothing remembered, overwritten or read that nobody wrote."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from fp8bench.features.audit.auditor import Auditor, Check, Given
from fp8bench.features.audit.optimizer import Optimizer
from fp8bench.features.audit.subjects import beside
from fp8bench.features.audit.values import AuditFinding

_DATA, _OTHER = "normal", "uniform"
# What is timed is called so often before anybody looks again.
_CALLS = 40
_POISONED = 4


class _Scene(NamedTuple):
    auditor: Auditor
    given: Given
    arguments: tuple[Tensor, ...]


class Memory(Check):
    """Calls it again and again, and changes what lies around it."""

    name = "memory"

    def look(self, auditor: Auditor) -> Iterator[AuditFinding]:
        given = Given(_DATA, auditor.shapes()[0])
        words = given.words(auditor.subject.sides)
        try:
            scene = _Scene(auditor, given, auditor.subject.arguments(auditor.matrices(given)))
            looks = [self._changed, self._overwritten]
            if auditor.sound:
                looks += [self._stale, self._keyed, self._poisoned, self._late, self._repeated, self._other_stream]
            for look in looks:
                found = look(scene)
                if found is not None:
                    yield found
        except Exception as error:  # noqa: BLE001 - foreign code may raise anything
            yield self.unknown(error, words)

    def _changed(self, scene: _Scene) -> AuditFinding | None:
        """What it was given must be as it was."""
        before = [one.detach().clone() for one in scene.arguments]
        scene.auditor.subject.results(scene.arguments)
        for place, (one, other) in enumerate(zip(scene.arguments, before, strict=True)):
            if not torch.equal(_bytes(one), _bytes(other)):
                return self._failed(scene, "input-changed", f"argument {place + 1} is not as it was before the call")
        return None

    def _stale(self, scene: _Scene) -> AuditFinding | None:
        """New values where others were: whoever remembers results by address gives the old ones."""
        subject = scene.auditor.subject
        subject.results(scene.arguments)
        fresh = _refilled(scene, _OTHER)
        if self._wrong(scene, fresh, subject.results(scene.arguments)):
            return self._failed(scene, "stale", "other values at the same addresses: the result is not theirs")
        return None

    def _keyed(self, scene: _Scene) -> AuditFinding | None:
        """Other values but in the first row and column: whoever knows inputs by a few values gives old results."""
        subject = scene.auditor.subject
        base = _refilled(scene, _DATA)
        subject.results(scene.arguments)
        fresh = scene.auditor.matrices(Given(_OTHER, scene.given.shape))
        for one, old in zip(fresh, base, strict=True):
            rows, kept = (matrix.view(-1, matrix.shape[-1]) for matrix in (one, old))
            rows[0], rows[:, 0], rows[-1], rows[:, -1] = kept[0], kept[:, 0], kept[-1], kept[:, -1]
        if self._wrong(scene, fresh, scene.auditor.results(fresh)):
            return self._failed(scene, "keyed", "all but the first and last rows and columns changed: old results")
        return None

    def _overwritten(self, scene: _Scene) -> AuditFinding | None:
        """A result is the caller's: a later call must not write into it."""
        subject = scene.auditor.subject
        first = subject.raw(scene.arguments)
        kept = {name: one.detach().clone() for name, one in first.items()}
        _refilled(scene, "rows of different sizes")
        subject.raw(scene.arguments)
        if any(not torch.equal(first[name], one) and not _nan_alike(first[name], one) for name, one in kept.items()):
            return self._failed(scene, "overwritten", "a later call writes into the result of an earlier one")
        return None

    def _poisoned(self, scene: _Scene) -> AuditFinding | None:
        """Memory that comes back from the allocator, and results that were given back, are full of NaN."""
        subject = scene.auditor.subject
        fresh = _refilled(scene, _DATA)
        for _ in range(_POISONED):
            for one in subject.raw(scene.arguments).values():
                one.detach().fill_(math.nan)
            if self._wrong(scene, fresh, subject.results(scene.arguments)):
                return self._failed(scene, "uninitialised", "after results were filled with NaN the next is wrong")
        return None

    def _late(self, scene: _Scene) -> AuditFinding | None:
        """After a loop as it is timed, with values that it has not seen."""
        subject = scene.auditor.subject
        for _ in range(_CALLS):
            subject.raw(scene.arguments)
        fresh = _refilled(scene, "outliers along the contraction")
        if self._wrong(scene, fresh, subject.results(scene.arguments)):
            return self._failed(scene, "late", f"after {_CALLS} calls with the same arguments results are wrong")
        return None

    def _repeated(self, scene: _Scene) -> AuditFinding | None:
        """At another address the same bits; a remark where sums are in another order each time."""
        subject = scene.auditor.subject
        fresh = _refilled(scene, _DATA)
        here, there = subject.results(scene.arguments), scene.auditor.results(fresh)
        if all(torch.equal(here[name], one) for name, one in there.items()):
            return None
        if self._wrong(scene, fresh, there):
            return self._failed(scene, "address", "the same values at other addresses: the result is wrong")
        return self.remark("not-repeatable", "the same values do not always give the same bits", self._words(scene))

    def _other_stream(self, scene: _Scene) -> AuditFinding | None:
        """Of a GPU: inputs that are written late on a stream of one's own, and a call on that stream behind them."""
        subject = scene.auditor.subject
        fresh = scene.auditor.matrices(Given(_OTHER, scene.given.shape))
        held, new = subject.arguments(scene.auditor.matrices(scene.given)), subject.arguments(fresh)
        with beside(subject.device) as there:
            if not there:
                return None
            with torch.no_grad():
                for one, other in zip(held, new, strict=True):
                    one.copy_(other)
            results = subject.results(held)
        if self._wrong(scene, fresh, results):
            return self._failed(scene, "stream", "on its caller's stream it does not wait for what went before")
        return None

    def _wrong(self, scene: _Scene, matrices: tuple[Tensor, ...], results: dict[str, Tensor]) -> bool:
        return any(one.failed for one in scene.auditor.judged(matrices, results).values())

    def _failed(self, scene: _Scene, code: str, why: str) -> AuditFinding:
        return self.fail(code, why, self._words(scene))

    def _words(self, scene: _Scene) -> str:
        return scene.given.words(scene.auditor.subject.sides)


def _refilled(scene: _Scene, data: str) -> tuple[Tensor, ...]:
    """Other data of the same shape, written where the arguments lie."""
    fresh = scene.auditor.matrices(Given(data, scene.given.shape))
    with torch.no_grad():
        for one, other in zip(scene.arguments, scene.auditor.subject.arguments(fresh), strict=True):
            one.copy_(other)
    return fresh


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.detach().contiguous().view(-1).view(torch.uint8)


def _nan_alike(one: Tensor, other: Tensor) -> bool:
    return bool(((one == other) | (one.isnan() & other.isnan())).all())


# Scales, and the count of steps, beside the moments.
_MORE = 1.05


class ManySteps(Check):
    """Counts that stand still, and updates that are lost, show late."""

    name = "many steps"

    def applies(self, auditor: Auditor) -> bool:
        return auditor.sound and isinstance(auditor.subject, Optimizer)

    def look(self, auditor: Auditor) -> Iterator[AuditFinding]:
        subject = auditor.subject
        assert isinstance(subject, Optimizer)
        given = Given(_DATA, subject.many)
        try:
            for name, one in auditor.wrong(given):
                yield auditor.finding(self.name, given, name, one)
            few = Given(_DATA, subject.held)
            state = subject.state_bytes(auditor.matrices(few))
        except Exception as error:  # noqa: BLE001 - foreign code may raise anything
            yield self.unknown(error, given.words(subject.sides))
            return
        if state is not None and state[0] > _MORE * state[1]:
            words = f"its state takes {state[0]:.3g} bytes an element, and {state[1]:.3g} were promised"
            yield self.remark("state-bytes", words, few.words(subject.sides))
