"""Whether results are those of the promised precision, on data in which one mistake or another shows."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from fp8bench.features.audit.auditor import Auditor, Check, Given
from fp8bench.features.audit.values import AuditFinding
from fp8bench.model.promises import AuditKind, Signature
from fp8bench.user_code import own_words


class Numbers(Check):
    """The check that the others rest on."""

    name = "numbers"

    def look(self, auditor: Auditor) -> Iterator[AuditFinding]:
        """The first failure of each result; each remark once."""
        said: set[tuple[str, str]] = set()
        for shape in auditor.shapes():
            for data in auditor.subject.data:
                given = Given(data, shape)
                try:
                    found = list(auditor.wrong(given))
                except Exception as error:  # noqa: BLE001 - foreign code may raise anything
                    yield self.unknown(error, given.words(auditor.subject.sides))
                    return
                for name, one in found:
                    key = name, one.code if one.remark else "failed"
                    if key not in said:
                        said.add(key)
                        yield auditor.finding(self.name, given, name, one)
            if any(code == "failed" for _, code in said):
                return


_DATA = "normal"
Looks = Callable[[Tensor, str], Iterator[AuditFinding]]


class SpecialValues(Check):
    """A number that is none must not become one."""

    name = "special values"

    def look(self, auditor: Auditor) -> Iterator[AuditFinding]:
        given = Given(_DATA, auditor.shapes()[0])
        matrices = auditor.matrices(given)
        for how, value, looks in (
            ("a NaN in the first row", math.nan, self._nan),
            ("an infinity in the first row", math.inf, self._infinity),
        ):
            changed = matrices[0].clone()
            changed.view(-1)[0] = value
            yield from self._looked(auditor, Given(_DATA, given.shape, how), (changed, *matrices[1:]), looks)
        zero = auditor.subject.zeroed(matrices)
        yield from self._looked(auditor, Given("zeros", given.shape), zero, self._zeros)
        tiny = (matrices[0] * torch.finfo(matrices[0].dtype).smallest_normal / 4, *matrices[1:])
        yield from self._looked(auditor, Given(_DATA, given.shape, "subnormal numbers"), tiny, self._tiny)

    def _looked(
        self, auditor: Auditor, given: Given, matrices: tuple[Tensor, ...], looks: Looks
    ) -> Iterator[AuditFinding]:
        words = given.words(auditor.subject.sides)
        try:
            results = auditor.results(matrices)
        except Exception as error:  # noqa: BLE001 - foreign code may raise anything
            yield self.remark("raises", f"{given.how or given.data}: {type(error).__name__}", words)
            return
        auditor.tried += len(results)
        result = next(iter(results.values()))
        yield from looks(result.reshape(-1, result.shape[-1]), words)

    def _nan(self, result: Tensor, words: str) -> Iterator[AuditFinding]:
        row, rest = result[0], result[1:]
        touched = row[:1] if len(row) and result.shape[1] and not bool(row.isnan().any()) else row
        if not bool(touched.isnan().any()):
            yield self.fail("nan-lost", "a NaN went in, and its row is all numbers", words)
        elif bool(rest.isnan().any()):
            yield self.remark("nan-spreads", "a NaN takes other rows along", words)

    def _infinity(self, result: Tensor, words: str) -> Iterator[AuditFinding]:
        if bool((~result[1:].isfinite()).any()):
            yield self.remark("infinity-spreads", "an infinity takes other rows along", words)
        elif not bool(result[1:].any()):
            yield self.remark("infinity-spreads", "an infinity makes all other rows zero", words)

    def _zeros(self, result: Tensor, words: str) -> Iterator[AuditFinding]:
        if not bool((result == 0).all()):
            yield self.fail("zeros", f"zeros went in, and {float(result.flatten()[0]):g} came out", words)

    def _tiny(self, result: Tensor, words: str) -> Iterator[AuditFinding]:
        if not bool(result.isfinite().all()):
            yield self.fail("subnormal", "subnormal numbers went in, and what came out are no numbers", words)


_ODD_DATA = ("normal", "blocks of different sizes")


class OddShapes(Check):
    """Tiles are whole, and matrices are not."""

    name = "odd shapes"

    def applies(self, auditor: Auditor) -> bool:
        return auditor.sound

    def look(self, auditor: Auditor) -> Iterator[AuditFinding]:
        refused: list[str] = []
        why = ""
        for shape in auditor.subject.odd:
            for data in _ODD_DATA[: 1 + (_ODD_DATA[1] in auditor.subject.data)]:
                given = Given(data, shape)
                try:
                    found = [(name, one) for name, one in auditor.wrong(given) if one.failed]
                except Exception as error:  # noqa: BLE001 - a refusal is what a size that does not divide may get
                    refused.append(given.words(auditor.subject.sides).partition(",")[0])
                    why = why or own_words(error)
                    break
                for name, one in found:
                    yield auditor.finding(self.name, given, name, one)
                    return
        if refused:
            yield self.remark(
                "refused", f"{len(refused)} of {len(auditor.subject.odd)} sizes are refused: {why}", refused[0]
            )


_BLOCKS = "blocks of different sizes"
_BLOCK = 128
Matrices = tuple[Tensor, ...]


class Relation(NamedTuple):
    """What is done to the matrices, and what a result has to become then."""

    words: str
    given: Callable[[Matrices], Matrices]
    wanted: Callable[[Tensor], Tensor]


def _rows(count: int) -> Tensor:
    return torch.arange(count).flip(0)


def _blocks_moved(matrix: Tensor) -> Tensor:
    return matrix.roll(_BLOCK, 1).contiguous()


def _flipped(matrices: Matrices, dimension: int) -> Matrices:
    return tuple(one.flip(dimension).contiguous() for one in matrices)


_SHARED = (
    Relation("the first operand doubled", lambda all_: (all_[0] * 2, *all_[1:]), lambda y: y * 2),
    Relation("the first operand negated", lambda all_: (-all_[0], *all_[1:]), lambda y: -y),
    Relation(
        "rows in another order", lambda all_: (all_[0][_rows(len(all_[0]))].contiguous(), *all_[1:]),
        lambda y: y[_rows(len(y))],
    ),
)  # fmt: skip
_OF_ATTENTION = (
    Relation("queries and keys negated", lambda all_: (-all_[0], -all_[1], all_[2]), lambda y: y),
    Relation("values doubled", lambda all_: (*all_[:2], all_[2] * 2), lambda y: y * 2),
    Relation("heads in another order", lambda all_: _flipped(all_, 1), lambda y: y.flip(1)),
    Relation("batches in another order", lambda all_: _flipped(all_, 0), lambda y: y.flip(0)),
)  # fmt: skip
_OF_OPTIMIZERS = (Relation("gradients and weights negated", lambda all_: tuple(-one for one in all_), lambda y: -y),)
_NOT_CAUSAL = Relation(
    "keys and values in another order",
    lambda all_: (all_[0], *_flipped(all_[1:], 2)),
    lambda y: y,
)
_OF_PRODUCTS = (
    Relation("the second operand halved", lambda all_: (all_[0], all_[1] / 2), lambda y: y / 2),
    Relation(
        "the second operand's rows in another order",
        lambda all_: (all_[0], all_[1][_rows(len(all_[1]))].contiguous()), lambda y: y[:, _rows(y.shape[1])],
    ),
    Relation(
        "blocks of the contraction in another order", lambda all_: tuple(map(_blocks_moved, all_)), lambda y: y
    ),
)  # fmt: skip


class Relations(Check):
    """What has to hold whatever the precision."""

    name = "relations"

    def applies(self, auditor: Auditor) -> bool:
        return auditor.subject.kind is not AuditKind.LINEAR

    def look(self, auditor: Auditor) -> Iterator[AuditFinding]:
        apart = auditor.subject.kind in (AuditKind.ATTENTION, AuditKind.OPTIMIZER)
        data = "normal" if apart else _BLOCKS
        shape = auditor.shapes()[0] if apart else auditor.fitting(auditor.shapes()[0]._replace(k=2 * _BLOCK))
        matrices = auditor.matrices(Given(data, shape))
        try:
            base = auditor.results(matrices)
            for one in self._relations(auditor.subject.signature):
                yield from self._held(auditor, one, matrices, base, Given(data, shape, one.words))
        except Exception as error:  # noqa: BLE001 - foreign code may raise anything
            yield self.unknown(error, Given(data, shape).words(auditor.subject.sides))

    def _relations(self, signature: Signature) -> tuple[Relation, ...]:
        if signature.kind is AuditKind.ATTENTION:
            return _OF_ATTENTION if signature.causal else (*_OF_ATTENTION, _NOT_CAUSAL)
        if signature.kind is AuditKind.OPTIMIZER:
            return _OF_OPTIMIZERS
        return _SHARED + (_OF_PRODUCTS if signature.kind is AuditKind.PRODUCT else ())

    def _held(
        self, auditor: Auditor, relation: Relation, matrices: Matrices, base: dict[str, Tensor], given: Given
    ) -> Iterator[AuditFinding]:
        changed = relation.given(matrices)
        promises = auditor.subject.promises(changed)
        results = auditor.results(changed)
        auditor.tried += len(results)
        for name, result in results.items():
            if result.shape != base[name].shape or not promises[name].agrees(result, relation.wanted(base[name])):
                why = f"{relation.words}: the result does not follow"
                yield self.fail("relation", why, given.words(auditor.subject.sides))
