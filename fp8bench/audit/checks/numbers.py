"""Whether results are those of the promised precision, on data in which one mistake or another shows."""

from __future__ import annotations

from collections.abc import Iterator

from fp8bench.audit.auditor import Auditor, Check, Given
from fp8bench.model.audit import AuditFinding


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
