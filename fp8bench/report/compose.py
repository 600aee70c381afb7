"""The page of a report: what it is called, what it was measured on, and its sections."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from fp8bench import units
from fp8bench.codec import SCHEMA
from fp8bench.model import Run
from fp8bench.report.elements import Page
from fp8bench.report.material import Material
from fp8bench.report.naming import listed
from fp8bench.report.run_facts import commit_of, counts, devices_of, fact, many, shortened, suites_of, when
from fp8bench.report.section import parts_of

_MOST_SUITES = 4
_MOST_DEVICES = 3
_MOST_LABELS = 8
_LONGEST_NAME = 60


def page_of(material: Material) -> Page:
    """The whole report; nothing in it tells of the machine or the time at which it is rendered."""
    runs = [entry.run for entry in material.entries]
    return Page(_title(runs), _subtitle(material), parts_of(material), tuple(_footer(runs)), tuple(_facts(runs)))


def _title(runs: Sequence[Run]) -> str:
    """'gemm, transformer on NVIDIA H200'."""
    suites = _each(shortened(suite, _LONGEST_NAME) for run in runs for suite in suites_of(run))
    devices = _each(shortened(device, _LONGEST_NAME) for run in runs for device in devices_of(run))
    named = ", ".join(suites) if len(suites) <= _MOST_SUITES else many(len(suites), "suite")
    where = listed(devices, _MOST_DEVICES)
    return " on ".join(part for part in (named, where) if part) or "A report without cases"


def _subtitle(material: Material) -> str:
    """When, at which commit and on which machine; of several runs, what tells them apart."""
    if not material.alone:
        labels = [entry.label for entry in material.entries]
        more = [f"{len(labels) - _MOST_LABELS} more"] if len(labels) > _MOST_LABELS else []
        return ": ".join(
            part for part in (many(len(labels), "run"), "; ".join([*labels[:_MOST_LABELS], *more])) if part
        )
    run = material.entries[0].run
    commit = commit_of(run)
    parts = [when(run), f"commit {commit}" if commit else "", fact(run, "machine")]
    return ", ".join(part for part in parts if part) or "the header of the run's file is lost"


def _facts(runs: Sequence[Run]) -> Iterator[tuple[str, str]]:
    """The few that a reader looks for first."""
    if len(runs) != 1:
        return
    run = runs[0]
    pairs = (
        ("cases", counts(run)),
        ("torch", fact(run, "torch")),
        ("threads", fact(run, "threads")),
        ("memory", listed([units.size(one.memory_bytes) for one in run.devices if one.accelerated], _MOST_DEVICES)),
    )
    yield from ((name, text) for name, text in pairs if text)


def _footer(runs: Sequence[Run]) -> Iterator[str]:
    """Where the numbers come from, a line a run."""
    for run in runs:
        version = fact(run, "fp8bench")
        by = f"fp8bench {version}" if version else "an fp8bench that its file no longer names"
        kept = f", kept in {run.path}" if run.path else ", not stored"
        yield f"Run {run.id or 'without an id'}, measured with {by}, schema {SCHEMA}{kept}."


def _each(words: Iterator[str]) -> list[str]:
    return list(dict.fromkeys(words))
