"""Parts of steps for programs: one JSON document, or a row a part."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from fp8bench.analysis.shares import StepParts
from fp8bench.model import Provenance, SharesFrom
from fp8bench.model.codec import encode
from fp8bench.report.data.plain import csv_text, json_line


class ShareRow(NamedTuple):
    """A part of a step: `seconds` are estimated, its share of the step's best case."""

    case: str
    precision: str
    kind: str
    module: str
    direction: str
    what: str
    calls: int
    share: float
    seconds: float | None
    provenance: str
    of: str


def share_rows(parts: Sequence[StepParts]) -> Iterator[ShareRow]:
    """Those of every case, the longest part first, what is left of its step last."""
    for one in parts:
        of = one.shares.of if one.shares is not None else SharesFrom.OPERATORS
        for row in one.rows:
            yield ShareRow(
                one.case.id, one.case.mode, row.kind, row.module, row.direction, row.what, row.calls, row.share,
                row.seconds, Provenance.ESTIMATED.value, of.value,
            )  # fmt: skip


def as_json(parts: Sequence[StepParts]) -> str:
    """Every case with its parts and what is left of its step, or why nobody knows them."""
    return json_line({
        "shares": [
            {"case": one.case.id, "precision": one.case.mode, "why": one.why, "seconds": one.seconds,
             "of": one.shares.of.value if one.shares is not None else None, "remarks": list(one.remarks),
             "parts": [encode(row) for row in one.rows]}
            for one in parts
        ]
    })  # fmt: skip


def as_csv(parts: Sequence[StepParts]) -> str:
    """A row a part."""
    return csv_text(ShareRow._fields, (row._asdict() for row in share_rows(parts)))
