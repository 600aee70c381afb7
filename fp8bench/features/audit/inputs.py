"""What kernels are given beside plain matrices: numbers that are none, sizes and layouts that nobody tries."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from fp8bench.features.audit import results
from fp8bench.features.audit.auditor import NORMAL, AuditCheck, AuditInput
from fp8bench.features.audit.promises import Matrices
from fp8bench.features.audit.results import BLOCK, BLOCKS
from fp8bench.features.audit.values import AuditFinding, AuditOutcome
from fp8bench.model.promises import AuditKind
from fp8bench.user_code import own_words

_ORDINALS = ("first", "second", "third")
# What is transposed of a matrix, and of heads.
_SIDES = (0, 1), (1, 2)
Results = dict[str, Tensor]


class SpecialValuesCheck(AuditCheck):
    """A number that is none must not become one."""

    name = "special values"

    def look(self) -> Iterator[AuditFinding]:
        """Each code once."""
        said: set[str] = set()
        for finding in self._all():
            if finding.code not in said:
                said.add(finding.code)
                yield finding

    def _all(self) -> Iterator[AuditFinding]:
        given = AuditInput(NORMAL, self.auditor.shapes()[0])
        matrices = self.auditor.matrices(given)
        first, *rest = matrices
        tiny = first * torch.finfo(first.dtype).smallest_normal / 4
        yield from self._looked(given._replace(data="zeros"), self.subject.zeroed(matrices), self._zeros)
        yield from self._looked(given._replace(how="subnormal numbers"), (tiny, *rest), self._tiny)
        for operand, matrix in enumerate(matrices[: 1 if self.subject.kind is AuditKind.OPTIMIZER else None]):
            last = matrix.numel() - 1
            for index in (0, (last - matrix.shape[-1]) // 2, last):
                for word, number in (("a NaN", math.nan), ("an infinity", math.inf)):
                    row, column = divmod(index, matrix.shape[-1])
                    how = f"{word} in the {_ORDINALS[operand]} argument's row {row}, column {column}"
                    looks = partial(self._nan if word == "a NaN" else self._infinity, operand=operand, row=row)
                    changed = _set(matrices, operand, index, number)
                    yield from self._looked(given._replace(how=how), changed, looks)

    def _looked(
        self, given: AuditInput, matrices: Matrices, looks: Callable[[Results, AuditInput], Iterator[AuditFinding]]
    ) -> Iterator[AuditFinding]:
        try:
            results = self.auditor.results(matrices)
        except Exception as error:  # noqa: BLE001 - foreign code may raise anything
            yield self.remark("raises", f"{given.how or given.data}: {type(error).__name__}", given)
            return
        self.auditor.tried += len(results)
        yield from looks(results, given)

    def _line(self, results: Results, operand: int, row: int) -> tuple[Tensor, Tensor]:
        """The results that a row of an operand goes into, and the others."""
        kind, names = self.subject.kind, list(results)
        result = results[names[operand == 2 and kind is AuditKind.LINEAR]]
        result = result.reshape(-1, result.shape[-1])
        own = torch.ones_like(result, dtype=torch.bool)
        if kind in (AuditKind.PRODUCT, AuditKind.LINEAR) and operand == 1:
            own[:] = torch.arange(result.shape[1]) == row
        elif kind is not AuditKind.OPTIMIZER and (operand == 0 or kind is AuditKind.LINEAR):
            own[:] = (torch.arange(len(result)) == row)[:, None]
        return result[own], result[~own]

    def _nan(self, results: Results, given: AuditInput, operand: int, row: int) -> Iterator[AuditFinding]:
        own, others = self._line(results, operand, row)
        if not bool(own.isnan().any()):
            yield self.fail("nan-lost", f"{given.how}: what it goes into is all numbers", given)
        elif bool(others.isnan().any()):
            yield self.remark("nan-spreads", "a NaN takes other rows along", given)

    def _infinity(self, results: Results, given: AuditInput, operand: int, row: int) -> Iterator[AuditFinding]:
        """It may become the largest number, or none; not nothing."""
        own, others = self._line(results, operand, row)
        if bool(own.isfinite().all()) and self.subject.kind in (AuditKind.PRODUCT, AuditKind.CAST, AuditKind.LINEAR):
            matrices = self.auditor.matrices(given)
            column = int(given.how.rpartition(" ")[2])
            without = _set(matrices, operand, row * matrices[operand].shape[-1] + column, 0.0)
            promises = self.subject.promises(without)
            if not any(promises[name].judge(result, search=False).failed for name, result in results.items()):
                yield self.fail("infinity-lost", f"{given.how}: results are those of a zero", given)
        if bool((~others.isfinite()).any()):
            yield self.remark("infinity-spreads", "an infinity takes other rows along", given)
        elif others.numel() and not bool(others.any()):
            yield self.remark("infinity-spreads", "an infinity makes all other rows zero", given)

    def _zeros(self, results: Results, given: AuditInput) -> Iterator[AuditFinding]:
        result = next(iter(results.values()))
        if not bool((result == 0).all()):
            yield self.fail("zeros", f"zeros went in, and {float(result.flatten()[0]):g} came out", given)

    def _tiny(self, results: Results, given: AuditInput) -> Iterator[AuditFinding]:
        if not bool(next(iter(results.values())).isfinite().all()):
            yield self.fail("subnormal", "subnormal numbers went in, and what came out are no numbers", given)


def _set(matrices: Matrices, operand: int, index: int, number: float) -> Matrices:
    changed = matrices[operand].clone()
    changed.view(-1)[index] = number
    return *matrices[:operand], changed, *matrices[operand + 1 :]


class ExtremesCheck(AuditCheck):
    """Sizes that nobody tries: far from one, tall, long, and nothing at all in a row among others."""

    name = "extremes"

    def applies(self) -> bool:
        return self.auditor.sound and self.subject.kind is not AuditKind.OPTIMIZER

    def look(self) -> Iterator[AuditFinding]:
        for given, whole in self._cases():
            results, matrices = self.auditor.results(whole), whole
            if given.shape == self.auditor.fitting(self.subject.tall) and self.subject.kind is not AuditKind.ATTENTION:
                # Rows that say how the others are: beside the ends of blocks, and those of the largest, of which
                # scales are.
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
        # What may be of any size: not where no scale follows it, or fp16 ends; scores are no sizes.
        scaled_ones = (2,) if self.subject.kind is AuditKind.ATTENTION else range(len(matrices))
        for operand in scaled_ones if matrices[0].dtype is not torch.float16 and self.subject.follows else ():
            for power in (40, -40):
                how = f"the {_ORDINALS[operand]} argument times 2^{power}"
                scaled = matrices[operand] * 2.0**power
                yield given._replace(how=how), (*matrices[:operand], scaled, *matrices[operand + 1 :])
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
    """Matrices that are parts of others, or lie otherwise: right, or refused."""

    name = "strides"

    def applies(self) -> bool:
        return self.auditor.sound and self.subject.kind is not AuditKind.OPTIMIZER

    def look(self) -> Iterator[AuditFinding]:
        given = AuditInput(NORMAL, self.auditor.shapes()[0])
        matrices = self.auditor.matrices(given)
        promises = self.subject.promises(matrices)
        refused = ""
        for operand in range(min(len(matrices), len(self.subject.sides))):
            for words, laid in _LAID.items():
                arguments = list(self.subject.arguments(matrices))
                about = given._replace(how=f"the {_ORDINALS[operand]} argument {words}")
                try:
                    moved = laid(arguments[operand].detach()).requires_grad_(arguments[operand].requires_grad)
                    results = self.subject.results((*arguments[:operand], moved, *arguments[operand + 1 :]))
                except Exception as error:  # noqa: BLE001 - a refusal is what it may get
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
    """Tiles are whole, and matrices are not."""

    name = "odd shapes"

    def applies(self) -> bool:
        return self.auditor.sound

    def look(self) -> Iterator[AuditFinding]:
        refused: list[str] = []
        why = ""
        for shape in self.subject.odd:
            for data in (NORMAL, BLOCKS) if BLOCKS in self.subject.data else (NORMAL,):
                given = AuditInput(data, shape)
                try:
                    found = [(name, verdict) for name, verdict in self.auditor.wrong(given).items() if verdict.failed]
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


# All that look at values, in the order in which they run.
CHECKS: tuple[type[AuditCheck], ...] = (
    *results.CHECKS,
    SpecialValuesCheck,
    OddShapesCheck,
    StridesCheck,
    ExtremesCheck,
)
