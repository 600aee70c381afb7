"""The self-test as a person sees it: a line a check, and the table of the power experiment."""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from fp8bench import __version__
from fp8bench.corpus import prepare_corpus
from fp8bench.environment import gather
from fp8bench.errors import EXIT_FAILED, EXIT_OK, StoreError
from fp8bench.measure.handle import ProcessWorker
from fp8bench.measure.raw import Settings
from fp8bench.selftest.checks import checks
from fp8bench.selftest.power import OPERATIONS, Arms, PowerRow, measure_power, operations, summarise
from fp8bench.units import percent, seconds

_SHOWN = ("machine", "system", "python", "torch", "cpu_count", "threads", "commit", "dirty")


def run_checks() -> int:
    """Print each check as it is done; 3 if one does not hold."""
    failed = 0
    with tempfile.TemporaryDirectory() as folder:
        for check in checks(prepare_corpus(None, Path(folder))):
            failed += not check.held
            print(f"{'ok  ' if check.held else 'FAIL'}  {check.what}\n        seen: {check.seen}", flush=True)
    print(f"{failed} checks failed" if failed else "all checks held")
    return EXIT_FAILED if failed else EXIT_OK


def run_power(trials: int, path: Path | None, chosen: Sequence[str] = OPERATIONS) -> int:
    """Run the power experiment, print its table, write its figures. 3 if a verdict had the wrong sign."""
    with tempfile.TemporaryDirectory() as folder:
        corpus = prepare_corpus(None, Path(folder))
        with ProcessWorker(Settings(corpus=corpus.path)) as worker:
            facts = next(one for one in worker.probe() if one.kind == "cpu")
            environment = gather(worker.software(), __version__, 1)
            kept = {name: environment.get(name) for name in _SHOWN}
            results: list[Arms] = []
            for operation in (one for one in operations(corpus.identity) if one.key in chosen):

                def after(result: Arms, done: tuple[Arms, ...] = tuple(results)) -> None:
                    _tick(f"{result.operation}: trial {len(result.loads)} of {trials}")
                    if path is not None:
                        _write(path, (*done, result), kept)

                results.append(measure_power(worker, facts, operation, trials, len(results), after))
                _tick("")
    print(power_table([row for result in results for row in summarise(result)], _loads(results)))
    return EXIT_FAILED if any(_wrong(row) for result in results for row in summarise(result)) else EXIT_OK


def _tick(text: str) -> None:
    if sys.stderr.isatty() and not os.environ.get("CI"):
        print(f"\r\x1b[K{text}", end="", file=sys.stderr, flush=True)


def _wrong(row: PowerRow) -> int:
    """Verdicts of the wrong sign: a planted slow-down called faster."""
    return row.faster if row.planted > 0 else 0


def _loads(results: Sequence[Arms]) -> str:
    loads = sorted(load for result in results for load in result.loads)
    return f"load {loads[0]:.1f} to {loads[-1]:.1f}, median {loads[len(loads) // 2]:.1f}, on {os.cpu_count()} cores"


def power_table(rows: Sequence[PowerRow], load: str) -> str:
    """The experiment's table: one line an operation and effect."""
    heading = (
        f"{'operation':<22}{'planted':>8}{'found':>8}{'trials':>8}{'slower':>8}{'faster':>8}{'same':>7}{'unsure':>8}"
    )
    lines = [
        "Planted slow-downs judged by the real estimator. `found` is the median ratio over trials; a verdict",
        "'slower' is a detection, and on 0% planted any 'faster' or 'slower' is a false alarm.",
        f"One thread; {load}.",
        "",
        heading + f"{'time a verdict':>24}",
    ]
    for row in rows:
        typical, longest = seconds(row.seconds_median, 2), seconds(row.seconds_longest, 2)
        lines.append(
            f"{row.operation:<22}{percent(row.planted):>8}{percent(row.found):>8}{row.trials:>8}"
            f"{percent(row.slower / row.trials, 0):>8}{percent(row.faster / row.trials, 0):>8}"
            f"{percent(row.same / row.trials, 0):>7}{percent(row.unsure / row.trials, 0):>8}"
            f"{f'{typical} (at most {longest})':>24}"
        )
    alarms = [row for row in rows if row.planted == 0]
    compared = sum(row.trials for row in rows)
    lines += [
        "",
        (
            f"false alarms: {sum(row.slower + row.faster for row in alarms)} of {sum(row.trials for row in alarms)} "
            f"identical pairs; wrong signs: {sum(_wrong(row) for row in rows)} of {compared} comparisons"
        ),
    ]
    return "\n".join(lines)


def _write(path: Path, results: Sequence[Arms], environment: dict[str, Any]) -> None:
    """The figures and every single comparison, written anew after each trial so that nothing is lost."""
    content = {
        "environment": environment,
        "rows": [asdict(row) for result in results for row in summarise(result)],
        "operations": [
            {
                "operation": result.operation, "step_seconds": result.step_seconds, "seconds": result.seconds,
                "tiny_calls": {str(effect): count for effect, count in result.extra.items()},
                "loads": [round(load, 2) for load in result.loads],
                "comparisons": {
                    str(effect): [
                        [one.verdict, round(one.seconds, 3), one.rounds, round(one.ratio, 5), round(one.low, 5),
                         round(one.high, 5)]
                        for one in outcomes
                    ]
                    for effect, outcomes in result.outcomes.items()
                },
            }
            for result in results
        ],
    }  # fmt: skip
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(content, indent=None, separators=(",", ":")) + "\n")
    except OSError as error:
        raise StoreError(
            f"--json {path} cannot be written ({error.strerror}). Name a file in a folder you may write."
        ) from None
