"""A study for programs: all of it as JSON, its runs as CSV."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from fp8bench.analysis.sensitivity import Study, Trial, as_words
from fp8bench.model.codec import SCHEMA, encode
from fp8bench.report.data.plain import csv_text, json_line

COLUMNS = (
    "part", "name", "kind", "precision", "precision_map", "layers_low", "draw", "loss", "loss_gap", "noise",
    "gradient_error", "says", "keeps_loss", "failure",
)  # fmt: skip


def as_json(study: Study) -> str:
    """The document on one line: every loss, and beside each run what it says."""
    document = {"schema": SCHEMA, **encode(study), "noise": encode(study.noise)}
    document["baseline"] = _told(study, study.baseline)
    for part in ("draws", "probes", "candidates"):
        document[part] = [_told(study, one) for one in getattr(study, part)]
    document["ranking"] = [one.name for one in study.ranking]
    found = study.suggested
    document["suggested"] = None if found is None else as_words(found.precision_map)
    return json_line(document)


def _told(study: Study, one: Trial) -> dict[str, Any]:
    said = {"loss": one.loss, "loss_gap": study.gap(one), "says": study.suffers(one).value}
    return {**encode(one), **{name: encode(value) for name, value in said.items()}}


def as_csv(study: Study) -> str:
    """A row a run; numbers with all their digits, nothing for what is not known."""
    return csv_text(COLUMNS, _rows(study))


def _rows(study: Study) -> Iterator[dict[str, Any]]:
    parts = (("reference", (study.baseline,)), ("draw", study.draws), ("low", study.ranking))
    for part, trials in (*parts, ("candidate", study.candidates)):
        for one in trials:
            yield {
                "part": part, "name": one.name, "kind": one.kind, "precision": one.precision,
                "precision_map": as_words(one.precision_map), "layers_low": len(one.low), "draw": one.draw,
                "loss": one.loss, "loss_gap": study.gap(one), "noise": study.noise,
                "gradient_error": one.gradient_error, "says": study.suffers(one).value,
                "keeps_loss": study.keeps(one) if part == "candidate" else None, "failure": one.failure,
            }  # fmt: skip
