"""Planted faults of a fleet are named in its report; an honest fleet gets no remarks.

Cells are measured once for real and copied to other machines with changed names, times and ids, where faults are
planted.
"""

from __future__ import annotations

import csv
import io
import json
import random
import shutil
from collections.abc import Callable
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from fp8bench import pipeline
from fp8bench.jobs.several_runs import make_fleet_plan
from fp8bench.jobs.several_runs import measure_cell as measure
from fp8bench.model import Request
from fp8bench.protocols import SilentObserver
from fp8bench.store.fleet_plans import write_plan
from tests.commands import Say, unfolded
from tests.older import as_older

Lines = list[dict[str, Any]]
# Changes the lines of a run; the first holds the header.
Plant = Callable[[dict[str, Any], Lines], object]


class Fleet:
    """Stores of machines, made of measured runs."""

    def __init__(self, folder: Path, plan: Path, runs: list[Lines]) -> None:
        self.folder, self.plan, self.runs, self.count = folder, plan, runs, 0
        self._random = random.Random(1)

    def add(self, name: str, plant: Plant = lambda head, lines: None, factor: float = 1.0) -> None:
        """Adds a machine with 1% noise, common and by case; `factor` makes it slower."""
        own = self._random.gauss(0, 0.01)
        for run in self.runs:
            self.count += 1
            lines: Lines = json.loads(json.dumps(run))
            head = lines[0]["header"]
            head |= {"id": f"{self.count:08x}", "started": _later(head["started"], milliseconds=self.count)}
            head["environment"]["facts"] |= {"machine": name, "asv_machine": name}
            for line in lines:
                for slot in line.get("record", {}).get("timing", {}).get("slots", ()):
                    scale = factor * (1 + own + self._random.gauss(0, 0.003))
                    for call in slot["calls_ns"]:
                        call[:] = [round(cell * scale) for cell in call]
            plant(head, lines)
            if lines:
                file = self.folder / name / "runs" / name / f"20260101T000000.000Z-nocommit-{head['id']}.jsonl"
                file.parent.mkdir(parents=True, exist_ok=True)
                file.write_text("".join(json.dumps(line) + "\n" for line in lines))


def _later(moment: str, **by: float) -> str:
    return (datetime.fromisoformat(moment) + timedelta(**by)).isoformat(timespec="milliseconds")


def _fact(**facts: object) -> Plant:
    return lambda head, lines: head["environment"]["facts"].update(facts)


def _failed(head: dict[str, Any], lines: Lines) -> None:
    lines[1]["record"] |= {"status": "failed", "reason": "planted", "timing": None}


def _dead(head: dict[str, Any], lines: Lines) -> None:
    """Killed in its first cell: only a header remains."""
    del lines[1 if head["cell"].endswith("/0") else 0 :]


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory, short_slots: None) -> tuple[Path, list[Lines]]:
    """A plan of three cells, and the lines of a run of each."""
    folder, axes = tmp_path_factory.mktemp("fleet"), (("shape", ("16", "24", "32")),)
    request = Request("gemm", ("fp32", "bf16"), quick=True, rounds=2, energy=False, isolation=False, axes=axes)
    plan = make_fleet_plan(request, *pipeline.plan_only(request, folder), "")
    write_plan(plan, folder / "plan.json")
    runs = [Path(measure(plan, number, folder / "own", SilentObserver(), "")[1].path) for number in range(3)]
    lines = [as_older(path).read_text().splitlines() for path in runs]
    return folder / "plan.json", [list(map(json.loads, run)) for run in lines]


@pytest.fixture
def empty(tmp_path: Path, measured: tuple[Path, list[Lines]]) -> Fleet:
    return Fleet(tmp_path / "stores", *measured)


@pytest.fixture
def fleet(empty: Fleet) -> Fleet:
    """Six honest machines."""
    for number in range(6):
        empty.add(f"honest{number}")
    return empty


def reported(fleet: Fleet, fp8bench: Say, *words: str) -> tuple[int, str]:
    out = fleet.folder.parent / "all"
    shutil.rmtree(out, ignore_errors=True)
    stores = sorted(map(str, fleet.folder.iterdir()))
    assert fp8bench("fleet", "collect", "--store", str(out), str(fleet.plan), *stores)[0] == 0
    code, text, _ = fp8bench("fleet", "report", str(out), *words)
    return code, text if "--json" in words else " ".join(text.split())


def named(out: str) -> dict[tuple[str, str], str]:
    """Reasons by machine and problem, from a report as JSON."""
    return {(alarm["machine"], alarm["what"]): alarm["words"] for alarm in json.loads(out)["alarms"]}


def test_an_honest_fleet_is_left_alone(fleet: Fleet, fp8bench: Say) -> None:
    code, out = reported(fleet, fp8bench, "--json")
    report = json.loads(out)
    assert code == 0 and report["alarms"] == [] and len(report["kinds"][0]["deviations"]) == 6
    assert len(report["machines"]) == 6 and report["lacking"] == []


def test_everything_that_is_planted_is_named_for_what_it_is(fleet: Fleet, fp8bench: Say, tmp_path: Path) -> None:
    fleet.add("slow", factor=2.0)
    fleet.add("fast", factor=0.5)
    fleet.add("dead", _dead)
    fleet.add("old", _fact(torch="2.12.0+cpu"))
    fleet.add("broken", _failed)
    fleet.add("other", _fact(asv_cpu="Another CPU", cpu_count=64), factor=0.5)
    page, rows = tmp_path / "page.html", tmp_path / "rows.csv"
    words = ("--json", "--html", str(page), "--csv", str(rows), "--machines", "honest0,never")
    code, out = reported(fleet, fp8bench, *words)
    expected = {
        ("slow", "slow"): "the limit is 10",
        ("fast", "fast"): "x the median time of its kind",
        ("dead", "cut off"): "",
        ("dead", "missing"): "",
        ("old", "other software"): "torch 2.12.0+cpu, not 2.",
        ("broken", "failed"): "3 of the cases that other machines measured failed: gemm",
        ("never", "missing"): "it sent nothing",
    }
    alarms = named(out)
    assert code == 3 and alarms.keys() == expected.keys()
    assert all(words in alarms[key] for key, words in expected.items()), alarms
    text = page.read_text()
    assert all(name in text for name in ("slow", "fast", "dead", "old"))
    csv_rows = list(csv.DictReader(io.StringIO(rows.read_text())))
    assert {row["machine"] for row in csv_rows if float(row["ratio"]) > 1.5} == {"slow"}
    # Different hardware is listed with a ratio; different software with the field that differs and no ratio.
    kinds = {row["machine"]: row["kind"] for row in csv_rows}
    assert len({kinds[name] for name in ("honest0", "other", "old")}) == 3
    why_not = json.loads(out)["why_not"]
    assert why_not.keys() == {kinds["old"]} and "torch 2.12.0" in why_not[kinds["old"]]


def test_machines_that_share_the_cells_lack_nothing(
    measured: tuple[Path, list[Lines]], fp8bench: Say, tmp_path: Path
) -> None:
    for place, name in enumerate(("one", "two", "three")):
        made = Fleet(tmp_path / "stores", measured[0], measured[1][place : place + 1])
        made.count = place
        made.add(name)
    code, out = reported(made, fp8bench)
    assert code == 0 and "No machine stands out; times were not compared: no kind has 6 machines" in out
    shutil.rmtree(tmp_path / "stores" / "two")
    code, out = reported(made, fp8bench)
    assert code == 0 and "2 of 3 cells were measured completely" in out and "measured by no machine: gemm" in out


def test_a_report_of_bad_files_gives_a_message(fleet: Fleet, fp8bench: Say, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    for words, message in (
        ((str(tmp_path / "empty"),), "has no run"),
        ((str(fleet.plan), "--store", str(tmp_path / "empty")), "has no run of the plan"),
    ):
        code, _, err = fp8bench("fleet", "report", *words)
        assert code == 2 and message in " ".join(err.split()), err
    copied = fleet.folder / "honest1" / "runs" / "honest1"
    for path in list(copied.iterdir()):
        first, *further_lines = path.read_text().splitlines(keepends=True)
        head = json.loads(first)
        head["header"]["id"] = f"c{head['header']['id']}"
        head["header"]["environment"]["facts"]["machine"] = "twin"
        (copied / f"copy-{path.name}").write_text("".join([json.dumps(head) + "\n", *further_lines]))
    code, _, err = fp8bench("fleet", "report", str(fleet.folder / "honest1"))
    assert code == 2 and "no run counts (" in unfolded(err) and "under the machines honest1 and twin" in unfolded(err)
    (fleet.folder / "honest0" / "runs" / "honest0" / "torn.jsonl").write_text('{"schema": 1, "hea')
    code, out, _ = fp8bench("fleet", "report", str(fleet.folder / "honest0"))
    assert code == 0 and "torn.jsonl" in "".join(out.split())
