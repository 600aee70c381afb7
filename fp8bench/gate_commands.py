"""`fp8bench gate`: what fails a build, and what it says to whom."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from fp8bench.compare_commands import write_outputs
from fp8bench.errors import UsageError
from fp8bench.gate_sources.duel import of_duel
from fp8bench.gate_sources.history import of_history
from fp8bench.gate_sources.sides import of_sides
from fp8bench.gate_sources.source import Source
from fp8bench.gating import junit, trend
from fp8bench.gating.judging import Judged, Outcome, first_look, second_look, unconfirmed
from fp8bench.gating.rules_file import read_rules
from fp8bench.gating.text import as_markdown, render
from fp8bench.gating.thresholds import Rule, check_rules
from fp8bench.gating.verdict import Verdict
from fp8bench.outputs import in_color, why_not_written
from fp8bench.streams import complain, say

_OUTPUTS = ("junit", "md", "benchmark_json")


def gate(arguments: argparse.Namespace) -> int:
    """Judge, look again at what is suspected, tell everybody who asked; returns the exit code."""
    _check(arguments)
    rules = read_rules(arguments.thresholds) if arguments.thresholds is not None else ()
    source = _source(arguments)
    notes = check_rules(rules, source.comparisons, str(arguments.thresholds))
    for note in notes:
        complain(note)
    verdict = Verdict(source.title, _judged(source, rules, arguments.rerun), source.notes, source.problem, source.code)
    failure = write_outputs({
        "--junit": (arguments.junit, junit.render(verdict)),
        "--md": (arguments.md, as_markdown(verdict)),
        "--benchmark-json": (arguments.benchmark_json, trend.render(verdict.judged)),
    })  # fmt: skip
    _summarise(verdict)
    say(render(verdict, in_color()) + "\n")
    if failure:
        raise UsageError(failure)
    return verdict.exit_code


def _check(arguments: argparse.Namespace) -> None:
    """What is asked for is one thing, and can be written, before anything is measured."""
    given = {"A B": arguments.sides, "--duel": arguments.duel is not None, "--history": arguments.history}
    asked = [name for name, there in given.items() if there]
    if len(asked) != 1:
        words = "nothing was" if not asked else f"{' and '.join(asked)} were"
        raise UsageError(f"{words} given to judge. Give two sides A B, or --duel DUEL, or --history.")
    if arguments.sides and len(arguments.sides) != 2:
        count = len(arguments.sides)
        raise UsageError(f"{count} side{'s were' if count != 1 else ' was'} given. Give two: what was, and what is.")
    for name in _OUTPUTS:
        path = getattr(arguments, name)
        why = why_not_written(str(path)) if path is not None else ""
        if why:
            raise UsageError(f"--{name.replace('_', '-')} {str(path)!r:.200} cannot be written: {why}. Give a file.")


def _source(arguments: argparse.Namespace) -> Source:
    if arguments.duel is not None:
        return of_duel(arguments.duel, arguments.store)
    if arguments.history:
        return of_history(arguments.store)
    before, after = arguments.sides
    return of_sides(before, after, arguments.store)


def _judged(source: Source, rules: tuple[Rule, ...], rerun: bool) -> tuple[Judged, ...]:
    """Both looks; the second only where there is something to look at, and somebody may."""
    judged = first_look(source.comparisons, rules)
    suspects = [one.comparison for one in judged if one.outcome is Outcome.TO_CONFIRM]
    if not suspects or source.problem:
        return judged
    if not rerun or source.confirm is None:
        return unconfirmed(judged, "--no-rerun")
    complain(f"gate: {len(suspects)} suspected, measured again")
    return second_look(judged, source.confirm(suspects), rules)


def _summarise(verdict: Verdict) -> None:
    """Under a GitHub job, where there is one. That it cannot be written is no reason to fail a build."""
    path = os.environ.get("GITHUB_STEP_SUMMARY")
    if not path:
        return
    try:
        with Path(path).open("a", encoding="utf-8", errors="backslashreplace") as file:
            file.write(as_markdown(verdict))
    except OSError as error:
        complain(f"the job's summary {path} could not be written ({error.strerror})")
