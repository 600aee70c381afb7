"""`fp8bench compare A B`: two runs, commits or stores, figure by figure."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from fp8bench.choosing import runs_meant
from fp8bench.comparing.compare import Compared, compare
from fp8bench.comparing.rows import as_csv, as_json, as_markdown
from fp8bench.comparing.sides import Side, side_of
from fp8bench.comparing.surroundings import hardware
from fp8bench.comparing.text import render
from fp8bench.errors import EXIT_OK, StoreError, UsageError
from fp8bench.history.runs import load_run
from fp8bench.model import Run
from fp8bench.outputs import check_outputs, in_color
from fp8bench.pipeline import findings
from fp8bench.streams import complain, say


def compare_sides(arguments: argparse.Namespace) -> int:
    """Read both sides, hold them against each other, tell. What it finds is no failure: `gate` judges."""
    check_outputs(arguments)
    compared = compared_sides(arguments.before, arguments.after, arguments.store)
    failed = write_outputs({"--csv": (arguments.csv, as_csv(compared.comparisons)),
                            "--md": (arguments.md, as_markdown(compared))})  # fmt: skip
    if arguments.csv == "-":
        say(as_csv(compared.comparisons))
    elif arguments.json:
        say(as_json(compared))
    else:
        say(render(compared, in_color()) + "\n")
    if failed:
        raise UsageError(failed)
    return EXIT_OK


def compared_sides(before: str, after: str, store: Path) -> Compared:
    """What two words come to. Raises RunNotFound, UsageError where both mean the same."""
    return compared_of(before, read_runs(runs_meant(before, store)), after, read_runs(runs_meant(after, store)))


def compared_of(before: str, old: Sequence[Run], after: str, new: Sequence[Run]) -> Compared:
    """What the runs that two words mean come to. Raises UsageError where a run is on both sides."""
    both = {run.id for run in old} & {run.id for run in new}
    if both:
        raise UsageError(
            f"{before!r:.80} and {after!r:.80} have the run {min(both)} in common. Give two sides of different runs."
        )
    old, new = _on_one_machine(old, new)
    return compare(_side(before, old), _side(after, new))


def read_runs(paths: Sequence[Path]) -> list[Run]:
    """The runs of some files; one that cannot be read is left out, and said so, unless it was the only one."""
    runs = []
    for path in paths:
        try:
            runs.append(load_run(path))
        except StoreError as error:
            if len(paths) == 1:
                raise
            complain(f"left out: {error}")
    if not runs:
        raise StoreError(f"none of {len(paths)} runs can be read. `fp8bench history verify` says why.")
    return runs


def write_outputs(wanted: dict[str, tuple[str | Path | None, str]]) -> str:
    """Write texts to the files that options name ('-' is no file); returns what could not be written."""
    failed = ""
    for option, (path, text) in wanted.items():
        if path is None or path == "-":
            continue
        try:
            Path(path).write_text(text, encoding="utf-8", errors="backslashreplace")
        except OSError as error:
            failed = f"{option} {path} could not be written ({error.strerror})."
    return failed


def _on_one_machine(old: Sequence[Run], new: Sequence[Run]) -> tuple[list[Run], list[Run]]:
    """Of sides with runs of several machines, those of the one that the newest run of the second was made on."""
    kinds = {hardware(run) for run in (*old, *new)}
    wanted = hardware(max(new, key=lambda run: run.started))
    kept = tuple([run for run in side if hardware(run) == wanted] for side in (old, new))
    if len(kinds) == 1 or not all(kept):
        return list(old), list(new)
    left = len(old) + len(new) - len(kept[0]) - len(kept[1])
    complain(f"{left} run{'s' * (left != 1)} of other machines left out: the rest is of {_machine(new, wanted)}")
    return kept[0], kept[1]


def _machine(runs: Sequence[Run], wanted: object) -> str:
    return str(next(run for run in runs if hardware(run) == wanted).environment.get("machine"))


def _side(name: str, runs: Sequence[Run]) -> Side:
    return side_of(name, [(run, findings(run)) for run in runs])
