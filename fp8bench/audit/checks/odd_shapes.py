"""Whether sizes that do not divide are done right, or refused; never done wrong."""

from __future__ import annotations

from collections.abc import Iterator

from fp8bench.audit.auditor import Auditor, Check, Given
from fp8bench.model.audit import AuditFinding
from fp8bench.user_code import own_words

_DATA = ("normal", "blocks of different sizes")


class OddShapes(Check):
    """Tiles are whole, and matrices are not."""

    name = "odd shapes"

    def applies(self, auditor: Auditor) -> bool:
        return auditor.sound

    def look(self, auditor: Auditor) -> Iterator[AuditFinding]:
        refused: list[str] = []
        why = ""
        for shape in auditor.subject.odd:
            for data in _DATA[: 1 + (_DATA[1] in auditor.subject.data)]:
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
