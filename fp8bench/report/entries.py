"""Runs become entries of a report, each with a label that tells it from the others."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from itertools import combinations

from fp8bench.model import Finding, Run
from fp8bench.report.material import Entry, Material, PastSeries
from fp8bench.report.run_facts import COMMIT_LETTERS, devices_of, fact, many, shortened, suites_of

LONGEST_LABEL = 40
_MOST_SUITES = 3


def material_of(
    runs: Sequence[Run], findings: Sequence[Mapping[str, Finding]], past: tuple[PastSeries, ...] = ()
) -> Material:
    """What a report is made from: each run with what its samples say, in the order given."""
    labelled = zip(runs, findings, labels_of(runs), strict=True)
    return Material(tuple(Entry(run, found, label) for run, found, label in labelled), past)


def labels_of(runs: Sequence[Run]) -> list[str]:
    """The shortest words that tell the runs apart, '' for one that is alone.

    What differs is tried in the order in which it explains numbers: one thing, then two of them, then the id, which
    always differs unless a run is named twice.
    """
    if len(runs) < 2:
        return [""] * len(runs)
    sources = [tuple(shortened(source(run), LONGEST_LABEL) for run in runs) for source in _SOURCES]
    chosen = [words for words in sources if all(words)]
    pairs = [
        tuple(f"{one}, {other}" for one, other in zip(*two, strict=True))
        for two in combinations([words for words in chosen if len(set(words)) > 1], 2)
    ]
    ids = tuple(run.id or "run" for run in runs)
    return list(next((words for words in (*chosen, *pairs) if len(set(words)) == len(runs)), _numbered(ids)))


def _precisions(run: Run) -> str:
    return ",".join(dict.fromkeys(record.case.mode for record in run.records))


def _suites(run: Run) -> str:
    found = suites_of(run)
    return ", ".join(found) if len(found) <= _MOST_SUITES else many(len(found), "suite")


_SOURCES: tuple[Callable[[Run], str], ...] = (
    lambda run: ", ".join(devices_of(run)),
    lambda run: fact(run, "commit")[:COMMIT_LETTERS],
    lambda run: fact(run, "machine"),
    lambda run: f"torch {fact(run, 'torch')}" if fact(run, "torch") else "",
    _suites,
    _precisions,
)


def _numbered(words: Sequence[str]) -> tuple[str, ...]:
    """Those that occur several times with a number."""
    numbers: Counter[str] = Counter()
    labels = []
    for word in words:
        numbers[word] += 1
        labels.append(f"{word} ({numbers[word]})" if words.count(word) > 1 else word)
    return tuple(labels)
