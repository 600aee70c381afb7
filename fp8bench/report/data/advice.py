"""Advice and the advisor's score for programs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fp8bench.model.advice import Advised, Checked, Cost
from fp8bench.model.codec import SCHEMA, encode
from fp8bench.report.data.plain import json_line


def as_json(advised: Advised, checked: Sequence[Checked], costs: Sequence[Cost], price: float | None) -> str:
    """All advice with its evidence, all answers, what was checked, and what decisions cost."""
    told = [{**encode(one), "money": encode(one.money(price)) if price is not None else None} for one in costs]
    return json_line({"schema": SCHEMA, **encode(advised), "checked": _plain(checked), "costs": told})


def score_as_json(checked: Sequence[Checked]) -> str:
    """Every check that was kept, with hits and counts."""
    told = [one for one in checked if one.hit is not None]
    hits = sum(one.hit is True for one in told)
    return json_line({"schema": SCHEMA, "hits": hits, "checks": len(told), "checked": _plain(checked)})


def _plain(checked: Sequence[Checked]) -> list[dict[str, Any]]:
    return [{**encode(one), "hit": one.hit} for one in checked]
