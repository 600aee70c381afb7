"""What becomes of NaN, infinities, zeros and the smallest numbers."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from fp8bench.audit.auditor import Auditor, Check, Given
from fp8bench.model.audit import AuditFinding

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
