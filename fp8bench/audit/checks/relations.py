"""Whether results change with what goes in as they must: doubled, negated, put in another order, zero."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from fp8bench.audit.auditor import Auditor, Check, Given
from fp8bench.model.audit import AuditFinding, AuditKind, Signature

_DATA = "blocks of different sizes"
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
        data = "normal" if apart else _DATA
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
