"""What `infer` has answered, in a store: `inference.jsonl`, a line each, beside the runs that it names.

Append-only, in any order: {"version": 1, "inference": {...}}. `advise` reads it.
"""

from __future__ import annotations

from pathlib import Path

from fp8bench.features.infer.values import ServingAnswer
from fp8bench.store.kept_lines import Log


def kept_answers(store: Path) -> Log[ServingAnswer]:
    return Log(store / "inference.jsonl", {"inference": ServingAnswer}, "answer of infer", 1, "Choose another --store.")
