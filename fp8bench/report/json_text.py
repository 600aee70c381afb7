"""A run as one JSON document: all that its file holds, and beside each record what its samples say."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from fp8bench.codec import SCHEMA, encode
from fp8bench.model import Finding, Record, Run


def render(run: Run, findings: Mapping[str, Finding]) -> str:
    """The document on one line. Strict JSON: what it has no word for is text, 'inf' or 'nan'."""
    header = {field.name: encode(getattr(run, field.name)) for field in fields(run) if field.name != "records"}
    records = [_record(record, findings.get(record.case.id)) for record in run.records]
    document = {"schema": SCHEMA, **header, "records": records}
    return json.dumps(document, separators=(",", ":"), allow_nan=False) + "\n"


def _record(record: Record, finding: Finding | None) -> dict[str, Any]:
    """A record with its finding, whose case is the record's."""
    said = None if finding is None else {name: value for name, value in encode(finding).items() if name != "case"}
    return {**encode(record), "finding": said}
