"""Stores made by hand: runs of the suite gemm at commits that nobody measured, quickly written, and read like any."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import NamedTuple

from fp8bench.model import (
    Case,
    Cell,
    Environment,
    Figure,
    Point,
    Record,
    Request,
    Run,
    Scalar,
    Segments,
    SlotSample,
    Status,
    Timing,
    Trend,
    Work,
)
from fp8bench.registry import workloads
from fp8bench.store.asv.identity import MachineInterpreter
from fp8bench.store.commit_runs import (
    TrackedRun,
    collect_series,
    group_by_interpreter,
    list_files_by_commit,
    merge_commit_points,
    read_runs,
)
from fp8bench.store.figures.lines import History, find_or_add_machine_home, trend_sort_key
from fp8bench.store.figures.tables import commit_date, median_with_interval
from fp8bench.store.runs.run_file import load_run, start_run
from fp8bench.store.series import list_grid_cells
from tests.runs import CPU, NATIVE, run_of

FOLLOWED = [name for name in workloads.names(hidden=True) if workloads.get(name).history is not None]
FIRST = datetime(2026, 1, 5, 12, tzinfo=UTC)
ROUNDS = 24
MACHINE: dict[str, Scalar | None] = {
    "machine": "box",
    "os": "Linux 6.1",
    "arch": "x86_64",
    "cpu": "AMD EPYC",
    "num_cpu": "2",
    "ram": "8589934592",
}
PYTHON = "/venv/bin/python3"


def commit(number: int) -> str:
    """The hash of a commit: '0000000a0000000a...' for 10."""
    return f"{number:08x}" * 5


def start(hours: float) -> str:
    """The start time of a run, `hours` after the first commit."""
    return (FIRST + timedelta(hours=hours)).isoformat(timespec="milliseconds")


def timing(nanoseconds: int, rounds: int = ROUNDS) -> Timing:
    """One call per round; rounds differ slightly, equally in every run."""
    slots = tuple(
        SlotSample(number, ((nanoseconds // 8, nanoseconds + 1000 * (number % 5), 100),), 1e-3, 1e-3)
        for number in range(rounds)
    )
    return Timing(Segments(("cast", "gemm", "unattributed"), (0, 0, 0)), slots)


def records(milliseconds: float = 1.0, status: Status = Status.OK, rounds: int = ROUNDS) -> list[Record]:
    """The first shape of gemm's grid in fp32, the reference, and in bf16, which takes half as long."""
    workload = workloads.get("gemm")
    params = next(iter(list_grid_cells(workload, CPU, None)))
    made = []
    for precision, share in (("fp32", 2.0), ("bf16", 1.0)):
        case = Case("gemm", params, precision, "cpu", version=workload.version)
        lead = precision == "fp32"
        if status is not Status.OK and not lead:
            made.append(Record(case, NATIVE, status, reason="out of memory, even alone"))
            continue
        time = timing(int(1e6 * milliseconds * share), rounds)
        made.append(Record(case, NATIVE, Status.OK, Work(flops=2e9), is_reference=lead, timing=time))
    return made


def run_at(number: int, hours: float | None = None, **changes: object) -> Run:
    """A run at commit `number`, committed that many hours after the first and measured an hour later.

    `changes` are fields of the run; among them `facts` are facts of its environment, and `id` names it.
    """
    when = number + 1 if hours is None else hours
    facts = {
        "machine": "box",
        "commit": commit(number),
        "dirty": False,
        "commit_date": int((FIRST + timedelta(hours=number)).timestamp() * 1000),
        **{f"asv_{name}": value for name, value in MACHINE.items()},
        "asv_python": PYTHON,
        **changes.pop("facts", {}),  # type: ignore[dict-item]
    }
    run = run_of(records(), id=f"{int(100 * when):08x}", started=start(when), request=Request("gemm"))
    return replace(run, environment=Environment(facts), **changes)  # type: ignore[arg-type]


def keep(store: Path, run: Run) -> Path:
    """Writes a run into a store, with an end if it is finished, and does not update asv's view."""
    writer = start_run(run, store)
    if run.records:
        writer.append(run.records)
    if run.finished:
        writer.finish("finished")
    writer.close()
    assert load_run(writer.path).finished is run.finished
    return writer.path


def history(store: Path, *milliseconds: float, **changes: object) -> list[Path]:
    """A commit for each time of bf16."""
    return [
        keep(store, run_at(number, records=tuple(records(time)), **changes)) for number, time in enumerate(milliseconds)
    ]


def tree(folder: Path) -> dict[str, bytes]:
    """Every file below a folder except caches: what a read-only command must leave unchanged."""
    files = [path for path in sorted(folder.rglob("*")) if path.is_file() and not _made_again(path)]
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


def _made_again(path: Path) -> bool:
    return path.name.startswith("figures.sqlite")


@dataclass
class _Line:
    """A trend that is being read: its newest shape, its rank among the metrics, figures with when they belong."""

    trend: Trend
    rank: int
    newest: str = ""
    figures: list[tuple[float, Figure]] = field(default_factory=list)


class Trends(NamedTuple):
    """A store's trends, its numbers of runs and commits, and how many runs were left out for which reasons."""

    trends: tuple[Trend, ...]
    runs: int
    commits: int
    left: Counter[str]


def trends_of(history: History, wanted: Callable[[str], bool]) -> Trends:
    return Trends(history.trends(wanted), history.runs, history.commits, history.skipped_run_reasons)


def figure_of(tracked: TrackedRun, point: Point) -> Figure:
    return Figure(
        tracked.commit,
        commit_date(tracked),
        point.version,
        point.runs,
        len(point.samples),
        *median_with_interval(point),
        point.hasty,
        point.status,
        point.reason,
        point.under,
    )


def read_trends(store: Path, wanted: Callable[[str], bool]) -> Trends:
    """All trends with requested names, sorted, by reading every run: the oracle for an opened history."""
    lines: dict[tuple[MachineInterpreter, str, Cell], _Line] = {}
    homes: list[MachineInterpreter] = []
    left: Counter[str] = Counter()
    runs = commits = 0
    for paths in list_files_by_commit(store).values():
        read = read_runs(paths)
        left.update(read.skipped_run_reasons)
        runs += len(read.runs)
        commits += bool(read.runs)
        for members in group_by_interpreter(read.runs):
            oldest, newest = members[0], members[-1]
            series = {metric.name: (rank, metric) for rank, metric in enumerate(collect_series(members))}
            home = find_or_add_machine_home(oldest.identity.home, homes)
            for (name, values), point in merge_commit_points(members).items():
                figure, (rank, definition) = figure_of(oldest, point), series[name]
                when = figure.date if figure.date is not None else oldest.sort_key[0] * 1000
                trend = Trend(definition, values, newest.identity.machine, home.python, ())
                if not wanted(trend.name):
                    continue
                line = lines.setdefault((home, trend.series.name, values), _Line(trend, rank))
                if newest.run.started > line.newest:
                    line.trend, line.rank, line.newest = trend, rank, newest.run.started
                line.figures.append((when, figure))
    telling = sorted(filter(_tells, lines.values()), key=lambda line: trend_sort_key(line.trend, line.rank))
    return Trends(tuple(map(_in_order, telling)), runs, commits, left)


def _in_order(line: _Line) -> Trend:
    return replace(line.trend, figures=tuple(figure for _, figure in sorted(line.figures, key=lambda pair: pair[0])))


def _tells(line: _Line) -> bool:
    return any(figure.value is not None or figure.status is Status.FAILED for _, figure in line.figures)
