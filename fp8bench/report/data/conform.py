"""What conform has found, for programs: one JSON document."""

from __future__ import annotations

from collections.abc import Sequence

from fp8bench.model import DeviceFacts
from fp8bench.model.codec import encode
from fp8bench.model.conformity import ModeConformity
from fp8bench.report.data.plain import json_line


def as_json(facts: DeviceFacts, found: Sequence[ModeConformity]) -> str:
    """The document on one line: every cast and product, with what explains its difference."""
    modes = [{**encode(one), "conforms": one.conforms} for one in found]
    return json_line({"device": encode(facts), "conforms": all(one.conforms for one in found), "modes": modes})
