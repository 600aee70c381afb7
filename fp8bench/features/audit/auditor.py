"""One audit from its beginning to its end."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from fp8bench.features.audit.attention import Attention
from fp8bench.features.audit.optimizer import Optimizer
from fp8bench.features.audit.promises import Judged
from fp8bench.features.audit.subjects import Cast, Linear, Product, Shape, Subject
from fp8bench.features.audit.values import AuditFinding, AuditOutcome, CallWork
from fp8bench.model import Ceilings
from fp8bench.model.promises import AuditKind
from fp8bench.user_code import own_words

SUBJECTS: dict[AuditKind, type[Subject]] = {one.kind: one for one in (Product, Cast, Linear, Attention, Optimizer)}


# What is tried for the smallest one that shows the same.
_SMALLER = (Shape(1, 1, 16), Shape(2, 2, 32), Shape(4, 4, 32), Shape(8, 8, 64), Shape(16, 16, 128), Shape(32, 32, 128))
# A result that lies in the band without being the promised one is searched for mistakes so often, of each name.
_SEARCHES = 4


@dataclass(frozen=True)
class Given:
    """What a callable is given: data of a shape, or matrices made of it (`how` says what was done to them)."""

    data: str
    shape: Shape
    how: str = ""

    def words(self, sides: tuple[tuple[str, str], ...]) -> str:
        """'M=64 N=96 K=256, normal'."""
        told = " ".join(f"{name}={getattr(self.shape, side)}" for side, name in sides)
        return f"{told}, {self.data}{f', {self.how}' if self.how else ''}"


class Auditor:
    """One subject under audit.

    `tried` counts the results that were judged. It is `sound` until numbers were found wrong: what compares results
    with their promise says nothing new of one that is not. `ceilings` are the device's, where they are known; checks
    leave their `times` by data, and the `work` of a call and of the `baseline`'s with the time of both (`compared`).
    """

    def __init__(
        self, subject: Subject, seed: int, ceilings: Ceilings | None = None, baseline: Subject | None = None
    ) -> None:
        self.ceilings, self.baseline = ceilings, baseline
        self.times: dict[str, float] = {}
        self.work: dict[str, CallWork] = {}
        self.compared: dict[str, float] = {}
        self.subject, self.seed, self.tried, self.sound = subject, seed, 0, True
        self._searches: Counter[str] = Counter()

    def shapes(self) -> tuple[Shape, ...]:
        """Those that it has promised to take."""
        return tuple(dict.fromkeys(map(self.fitting, self.subject.shapes)))

    def fitting(self, shape: Shape) -> Shape:
        """The next one of whole multiples."""
        multiple = self.subject.signature.multiple
        return Shape(*(math.ceil(side / multiple) * multiple for side in shape))

    def matrices(self, given: Given) -> tuple[Tensor, ...]:
        """As they are drawn."""
        return self.subject.drawn(given.data, given.shape, self.seed)

    def results(self, matrices: tuple[Tensor, ...]) -> dict[str, Tensor]:
        """What the callable makes of matrices that it has never seen."""
        return self.subject.results(self.subject.arguments(matrices))

    def judged(self, matrices: tuple[Tensor, ...], results: dict[str, Tensor]) -> dict[str, Judged]:
        """Each result, held against its promise."""
        promises = self.subject.promises(matrices)
        found = {}
        for name, result in results.items():
            self.tried += 1
            one = promises[name].judge(result, self._searches[name] < _SEARCHES)
            self._searches[name] += one.remark
            found[name] = one
        return found

    def wrong(self, given: Given) -> Iterator[tuple[str, Judged]]:
        """What is wrong with the results of one input, by name; remarks too."""
        matrices = self.matrices(given)
        for name, one in self.judged(matrices, self.results(matrices)).items():
            if one.code:
                yield name, one

    def finding(self, check: str, given: Given, name: str, judged: Judged) -> AuditFinding:
        """Of a result that is wrong, or is remarked on, with the smallest input that shows the same."""
        outcome = AuditOutcome.PASS if judged.remark else AuditOutcome.FAIL
        smallest = given if judged.remark else self._smallest(given, name, judged)
        result = "" if len(self.subject.sides) < 3 or name == "product" else f"{name}: "
        return AuditFinding(
            check, outcome, judged.code, result + judged.why, smallest.words(self.subject.sides), judged.error,
            judged.expected,
        )  # fmt: skip

    def _smallest(self, given: Given, name: str, judged: Judged) -> Given:
        if given.how:
            return given
        for shape in map(self.fitting, _SMALLER):
            smaller = Given(given.data, shape)
            try:
                if any(one.code == judged.code for which, one in self.wrong(smaller) if which == name):
                    return smaller
            except Exception:  # noqa: BLE001 - it may refuse what is small
                continue
        return given


class Check(ABC):
    """One way to find a lie, by the name that is shown."""

    name: ClassVar[str]

    @abstractmethod
    def look(self, auditor: Auditor) -> Iterator[AuditFinding]:
        """What it found; nothing where all is well."""

    def applies(self, auditor: Auditor) -> bool:
        """Whether it has anything to look at."""
        return True

    def fail(self, code: str, why: str, words: str) -> AuditFinding:
        return AuditFinding(self.name, AuditOutcome.FAIL, code, why, words)

    def remark(self, code: str, why: str, words: str = "") -> AuditFinding:
        return AuditFinding(self.name, AuditOutcome.PASS, code, why, words)

    def unknown(self, error: BaseException, words: str) -> AuditFinding:
        """What it raised where it should have answered."""
        return AuditFinding(self.name, AuditOutcome.CANNOT_TELL, "raises", own_words(error), words)
