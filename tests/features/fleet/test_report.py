"""What is planted in a fleet is named in its report, each for what it is; an honest fleet is left alone.

Cells are measured once, for real, and become other machines' by their names, times and ids; what is planted is planted
there. Machines that really are slow, or really compute other bits, are in the slow test.
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

import fp8bench as fp8bench_api
from fp8bench import pipeline
from fp8bench.jobs.cells import cut
from fp8bench.jobs.cells import measured as measure
from fp8bench.model import Request
from fp8bench.protocols import SilentObserver
from fp8bench.store.fleet_plans import write_plan
from tests.commands import Say, unfolded
from tests.older import as_older, changed_document
from tests.own_suites import forgotten

Lines = list[dict[str, Any]]
Plant = Callable[[Lines], Lines | None]


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory, short_slots: None) -> tuple[Path, list[Lines]]:
    """A plan of three cells, and the lines of a run of each."""
    folder, axes = tmp_path_factory.mktemp("fleet"), (("shape", ("16", "24", "32")),)
    request = Request("gemm", ("fp32", "bf16"), quick=True, rounds=2, energy=False, isolation=False, axes=axes)
    plan = cut(request, *pipeline.plan_only(request, folder), "")
    write_plan(plan, folder / "plan.json")
    runs = [Path(measure(plan, number, folder / "own", SilentObserver(), "")[1].path) for number in range(3)]
    lines = [as_older(path).read_text().splitlines() for path in runs]
    return folder / "plan.json", [list(map(json.loads, one)) for one in lines]


class Fleet:
    """Stores of machines that are made of measured runs."""

    def __init__(self, folder: Path, plan: Path, runs: list[Lines]) -> None:
        self.folder, self.plan, self.runs, self.count = folder, plan, runs, 0
        self._random = random.Random(1)

    def add(self, name: str, plant: Plant = lambda lines: lines, factor: float = 1.0) -> None:
        """A machine: 1% beside the others in all it does, and in each case; `factor` is how much slower it is."""
        own = self._random.gauss(0, 0.01)
        for run in self.runs:
            self.count += 1
            lines: Lines = json.loads(json.dumps(run))
            head = lines[0]["header"]
            head["id"] = f"{self.count:08x}"
            head["started"] = _later(head["started"], milliseconds=self.count)
            head["environment"]["facts"] |= {"machine": name, "asv_machine": name}
            for line in lines:
                for slot in line.get("record", {}).get("timing", {}).get("slots", ()):
                    scale = factor * (1 + own + self._random.gauss(0, 0.003))
                    slot["calls_ns"] = [[round(cell * scale) for cell in call] for call in slot["calls_ns"]]
            planted = plant(lines)
            if planted is not None:
                file = self.folder / name / "runs" / name / f"20260101T000000.000Z-nocommit-{head['id']}.jsonl"
                file.parent.mkdir(parents=True, exist_ok=True)
                file.write_text("".join(json.dumps(line) + "\n" for line in planted))


def _later(moment: str, **by: float) -> str:
    return (datetime.fromisoformat(moment) + timedelta(**by)).isoformat(timespec="milliseconds")


def _fact(**facts: object) -> Plant:
    def plant(lines: Lines) -> Lines:
        lines[0]["header"]["environment"]["facts"] |= facts
        return lines

    return plant


def _clock(**by: float) -> Plant:
    def plant(lines: Lines) -> Lines:
        lines[0]["header"]["started"] = _later(lines[0]["header"]["started"], **by)
        return lines

    return plant


def _store_clock(seconds: float, server: float = 0.0) -> Plant:
    """A clock ahead of the right one, on a shared store whose server's clock is ahead, too."""

    def plant(lines: Lines) -> Lines:
        lines[0]["header"]["clock_ahead"] = seconds - server
        return _clock(seconds=seconds)(lines) or []

    return plant


def _bits(lines: Lines) -> Lines:
    """A product's last bit, as a digest tells it, and another case's error."""
    lines[0]["header"]["bits"][0]["digests"] = ["0123456789abcdef"]
    return lines


def _error(lines: Lines) -> Lines:
    for one in lines[1]["record"]["measurements"]:
        one["samples"] = [value * (1 + 2**-50) for value in one["samples"]]
    return lines


def _dead(lines: Lines) -> Lines | None:
    """Killed in its first cell: a header and a line that was cut short."""
    return [lines[0]] if lines[0]["header"]["cell"].endswith("/0") else None


def _silent(lines: Lines) -> Lines:
    lines[0]["header"]["bits"] = []
    return lines


def _unstable(lines: Lines) -> Lines:
    first = lines[0]["header"]["bits"][5]
    first["digests"] = [*first["digests"], "0123456789abcdef"]
    return lines


@pytest.fixture
def fleet(tmp_path: Path, measured: tuple[Path, list[Lines]]) -> Fleet:
    """Six honest machines."""
    made = Fleet(tmp_path / "stores", *measured)
    for number in range(6):
        made.add(f"honest{number}")
    return made


def reported(fleet: Fleet, fp8bench: Say, *words: str) -> tuple[int, str, str]:
    out = fleet.folder.parent / "all"
    shutil.rmtree(out, ignore_errors=True)
    stores = sorted(map(str, fleet.folder.iterdir()))
    assert fp8bench("fleet", "collect", "--store", str(out), str(fleet.plan), *stores)[0] == 0
    return fp8bench("fleet", "report", str(out), *words)


def test_an_honest_fleet_is_left_alone(fleet: Fleet, fp8bench: Say) -> None:
    """And says from where on a machine would be named."""
    code, out, _ = reported(fleet, fp8bench)
    assert code == 0 and "No machine stands out." in out and "3 of 3 cells were measured completely" in out
    code, out, _ = reported(fleet, fp8bench, "--json")
    found = json.loads(out)
    assert code == 0 and found["alarms"] == [] and 0.05 <= found["kinds"][0]["seen_from"] < 0.5
    assert len(found["machines"]) == 6 and found["lacking"] == []


def test_everything_that_is_planted_is_named_for_what_it_is(fleet: Fleet, fp8bench: Say, tmp_path: Path) -> None:
    """All in one fleet, and nobody else."""
    fleet.add("slow", factor=2.0)
    fleet.add("corrupt", _bits)
    fleet.add("wrong", _error)
    fleet.add("unstable", _unstable)
    fleet.add("dead", _dead)
    fleet.add("old", _fact(torch="2.12.0+cpu"))
    fleet.add("early", _clock(days=-1))
    fleet.add("late", _clock(days=1))
    page, rows = tmp_path / "page.html", tmp_path / "rows.csv"
    words = ("--json", "--html", str(page), "--csv", str(rows), "--machines", "honest0,never")
    code, out, err = reported(fleet, fp8bench, *words)
    alarms = json.loads(out)["alarms"]
    named = {(one["machine"], one["what"]): one["words"] for one in alarms}
    assert code == 3 and set(named) == {
        ("slow", "slow"), ("corrupt", "other bits"), ("wrong", "other bits"), ("unstable", "unstable bits"),
        ("dead", "cut off"), ("dead", "missing"), ("old", "other software"), ("early", "clock"), ("late", "clock"),
        ("never", "missing"),
    }, alarms  # fmt: skip
    assert "float32 product on cpu" in named["corrupt", "other bits"]
    assert "error of gemm" in named["wrong", "other bits"]
    assert "bfloat16 product on cpu" in named["unstable", "unstable bits"]
    assert named["old", "other software"].startswith("torch 2.12.0+cpu, not 2.")
    assert "not compared" in named["old", "other software"]
    assert "24.0 hours before its plan" in named["early", "clock"] and "hours after its file" in named["late", "clock"]
    assert named["never", "missing"] == "nothing came of it"
    text = page.read_text()
    assert all(name in text for name in ("slow", "corrupt", "dead", "old", "Time over that of the kind")), err
    told = list(csv.DictReader(io.StringIO(rows.read_text())))
    assert {row["machine"] for row in told if row["odd"].lower() == "true"} == {"slow"}
    assert {row["kind"] for row in told if row["machine"] == "old"} == {"B"}


@pytest.mark.parametrize("server", [0.0, 7200.0])
def test_a_clock_that_is_off_by_less_than_the_plans_age(fleet: Fleet, fp8bench: Say, server: float) -> None:
    """By the clock of a shared store, though their times could be true; where that is wrong, by most machines'."""
    plan: dict[str, Any] = changed_document(fleet.plan)
    plan["fleet"]["created"] = _later(plan["fleet"]["created"], days=-3)
    fleet.plan = fleet.folder.parent / "old.json"
    fleet.plan.write_text(json.dumps(plan))
    shutil.rmtree(fleet.folder)
    planted = {"day": -86400.0, "behind": -600.0, "ahead": 600.0, "alike": 30.0}
    for name, seconds in (dict.fromkeys(("h0", "h1", "h2", "h3", "h4"), 0.0) | planted).items():
        fleet.add(name, _store_clock(seconds, server))
    out = fleet.folder.parent / "all"
    code, text, _ = reported(fleet, fp8bench, "--json")
    found = json.loads(text)
    named = {one["machine"]: one["words"] for one in found["alarms"] if one["what"] == "clock"}
    assert code == 3 and set(named) == {"day", "behind", "ahead"} == {one["machine"] for one in found["alarms"]}, named
    for name, words in (("day", "24.0 hours behind"), ("behind", "10 minutes behind"), ("ahead", "10 minutes ahead")):
        assert words in named[name], named
    assert any("2.0 hours ahead of that of most machines" in one for one in found["excluded"]) == bool(server), out


def test_a_wrong_clock_of_whoever_planned_names_no_machine(fleet: Fleet, fp8bench: Say) -> None:
    """All six began before the plan that they followed was made."""
    plan: dict[str, Any] = changed_document(fleet.plan)
    plan["fleet"]["created"] = _later(plan["fleet"]["created"], hours=2)
    fleet.plan = fleet.folder.parent / "late.json"
    fleet.plan.write_text(json.dumps(plan))
    code, out, _ = reported(fleet, fp8bench)
    assert code == 0 and "that of whoever made the plan: that one may be wrong" in " ".join(out.split())


def test_a_clock_that_was_set_back(fleet: Fleet, fp8bench: Say) -> None:
    """A run that says it was gone on with before it began."""

    def plant(lines: Lines) -> Lines:
        head = lines[0]["header"]
        again = {"started": _later(head["started"], minutes=-10), "command": "", "environment": head["environment"]}
        return [*lines, {"resumed": again}]

    fleet.add("set", plant)
    code, out, _ = reported(fleet, fp8bench, "--json")
    alarms = [one for one in json.loads(out)["alarms"] if one["what"] == "clock"]
    assert code == 3 and [one["machine"] for one in alarms] == ["set"] and "10 minutes before it" in alarms[0]["words"]


def test_the_report_of_a_cell_has_its_fleet(fleet: Fleet, fp8bench: Say, tmp_path: Path) -> None:
    """As a section of the ordinary page, on the terminal, as JSON, rows and frames; of other runs nothing."""
    fleet.add("slow", factor=3.0)
    assert reported(fleet, fp8bench, "--json")[0] == 3
    store, page = tmp_path / "all", tmp_path / "page.html"
    files = ("--html", str(page), "--md", str(tmp_path / "p.md"))
    assert fp8bench("report", "last", "--store", str(store), *files)[0] == 0
    text, section = page.read_text(), '<section id="fleet"'
    assert text.count(section) == 1 and "This run is cell 2 of plan" in text
    section_text = text.partition(section)[2].partition("</section>")[0]
    assert all(name in section_text for name in ("honest0", "slow from", "Machines that stand out", "<svg"))
    assert "Fleet" in (tmp_path / "p.md").read_text()
    _, out, _ = fp8bench("show", "last", "--store", str(store), "--fleet", "--json")
    assert [(one["machine"], one["what"]) for one in json.loads(out)["alarms"]] == [("slow", "slow")]
    _, rows, _ = fp8bench("show", "last", "--store", str(store), "--fleet", "--csv", "-")
    _, same, _ = fp8bench("fleet", "report", str(store), "--csv", "-")
    assert rows == same and "slow" in rows
    frames = fp8bench_api.load_fleet(store)
    assert list(frames.alarms.what) == ["slow"] and len(frames.cases) == len(rows.splitlines()) - 1
    assert dict(zip(frames.machines.name, frames.machines.named_for, strict=True))["slow"] == "slow"
    assert set(frames.kinds.of) == {"hardware", "software"}
    code, out, _ = fp8bench("report", str(store), "--html", str(page))
    assert code == 0 and "-21-runs" in out and page.read_text().count(section) == 1
    code, _, err = fp8bench("report", str(store), "last")
    assert code == 2 and "Name it alone" in err


def test_a_run_of_no_plan_has_no_fleet(measured: tuple[Path, list[Lines]], fp8bench: Say, tmp_path: Path) -> None:
    made = Fleet(tmp_path / "stores", *measured)

    def alone(lines: Lines) -> Lines:
        lines[0]["header"]["cell"] = ""
        return lines

    made.add("one", alone)
    store, page = tmp_path / "stores" / "one", tmp_path / "page.html"
    assert fp8bench("report", "last", "--store", str(store), "--html", str(page))[0] == 0
    assert '<section id="fleet"' not in page.read_text()
    code, _, err = fp8bench("show", "last", "--store", str(store), "--fleet")
    assert code == 2 and "is no cell of a fleet's plan" in err
    code, _, err = fp8bench("show", "last", "--store", str(store), "--fleet", "--tape")
    assert code == 2 and "--tape and --fleet are two tables" in err


def test_like_with_like_only(fleet: Fleet, fp8bench: Say) -> None:
    """Other hardware stands beside with a ratio; other software with the field that differs, and no ratio."""
    fleet.add("other", _fact(asv_cpu="Another CPU", cpu_count=64), factor=0.5)
    fleet.add("old", _fact(torch="2.12.0+cpu"))
    code, out, _ = reported(fleet, fp8bench)
    assert code == 3 and "torch 2.12.0+cpu, not" in out
    rows = [line.split() for line in out.splitlines() if line.split()[:1] in (["A"], ["B"], ["C"])]
    ratios = {row[0]: row[-1] for row in rows if len(row) > 8 and row[2][0].isdigit()}
    assert ratios["A"] == "-" and {ratios["B"], ratios["C"]} > {"-"}
    assert "other" not in {line.split()[0] for line in out.partition("Machines\n")[0].splitlines() if line.split()}


def test_machines_that_share_the_cells_lack_nothing(
    tmp_path: Path, measured: tuple[Path, list[Lines]], fp8bench: Say
) -> None:
    """Each cell is measured once, by whoever was free; what nobody has measured is told of."""
    for place, name in enumerate(("one", "two", "three")):
        made = Fleet(tmp_path / "stores", measured[0], measured[1][place : place + 1])
        made.count = place
        made.add(name)
    code, out, _ = reported(made, fp8bench)
    assert code == 0 and "No machine stands out." in out
    shutil.rmtree(tmp_path / "stores" / "two")
    code, out, _ = reported(made, fp8bench)
    assert code == 0 and "2 of 3 cells were measured completely" in out and "by no machine: gemm" in out


def test_two_that_differ_are_both_told_of(tmp_path: Path, measured: tuple[Path, list[Lines]], fp8bench: Say) -> None:
    """With nobody else there, nobody knows which is right; and of fewer than four no time is odd."""
    made = Fleet(tmp_path / "stores", *measured)
    made.add("one")
    made.add("two", _bits, factor=9.0)
    made.add("silent", _silent)
    code, out, _ = reported(made, fp8bench)
    assert "of silent 3 runs have no bits" in " ".join(out.split())
    assert code == 3 and " ".join(out.split()).count("either may be wrong") == 2 and "needs 4 machines" in out
    assert "slow " not in out.partition("Machines\n")[0]


def test_nonsense(fleet: Fleet, fp8bench: Say, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    for words, said in (
        ((str(tmp_path / "nowhere.json"),), "cannot be read"),
        ((str(tmp_path / "empty"),), "has no run. Give"),
        ((str(fleet.plan), "--store", str(tmp_path / "empty")), "has no run of the plan"),
        ((str(fleet.plan), "--json", "--csv", "-"), "would both print"),
        ((str(fleet.plan), "--html", str(tmp_path)), "is a directory"),
    ):
        code, _, err = fp8bench("fleet", "report", *words)
        assert code == 2 and said in " ".join(err.split()), err
    copied = fleet.folder / "honest1" / "runs" / "honest1"
    for path in list(copied.iterdir()):
        lines = path.read_text().partition("\n")
        head = json.loads(lines[0])
        head["header"]["id"] = f"c{head['header']['id']}"
        head["header"]["environment"]["facts"]["machine"] = "twin"
        (copied / f"copy-{path.name}").write_text(json.dumps(head) + "".join(lines[1:]))
    code, _, err = fp8bench("fleet", "report", str(fleet.folder / "honest1"))
    assert code == 2 and "honest1 no run counts (" in unfolded(err)
    assert "the same times to the nanosecond under the machines honest1 and twin, so that none of them" in unfolded(err)
    (fleet.folder / "honest0" / "runs" / "honest0" / "torn.jsonl").write_text('{"schema": 1, "hea')
    code, out, _ = fp8bench("fleet", "report", str(fleet.folder / "honest0"))
    assert code == 0 and "torn.jsonl" in "".join(out.split())


REAL = """
import os, platform, torch
from fp8bench.suites import Axis, Work, Workload, whole_number, workloads

@workloads.register("planted")
class Planted(Workload):
    name = "planted"
    summary = "a product"

    def axes(self, facts):
        return (Axis("n", "rows", ("32",), whole_number(low=1)),)

    def work(self, params):
        return Work(2.0 * params["n"] ** 3)

    def prepare(self, setup):
        return torch.randn((32, 32), generator=torch.Generator().manual_seed(setup.seed))

    def step(self, state, phase):
        with phase.gemm:
            for _ in range(300 if platform.node() == "slow" else 1):
                state @ state

    def error(self, setup):
        state = self.prepare(setup)
        found = state @ state
        if platform.node() == "corrupt":
            found.view(torch.int32)[3, 4] ^= 1
        return {"product_error": float((found.double() - state.double() @ state.double()).abs().sum())}
"""


@pytest.mark.slow
def test_machines_that_really_are_slow_or_wrong(tmp_path: Path, fp8bench: Say, monkeypatch: pytest.MonkeyPatch) -> None:
    """Eight measure the same cell one after the other, under names of their own: one does more, one flips a bit."""
    (tmp_path / "planted_suite.py").write_text(REAL)
    monkeypatch.chdir(tmp_path)
    with forgotten(tmp_path):
        words = "planted --import ./planted_suite.py --quick --no-energy --rounds 4 --dtypes fp32 --no-isolation"
        assert fp8bench("suite", *words.split(), "--dry-run", "--write-plan", "plan.json")[0] == 0
        stores = ("a", "b", "c", "d", "e", "f", "slow", "corrupt")
        for name in stores:
            monkeypatch.setattr("platform.node", lambda name=name: name)
            cell = ("--plan", "plan.json", "--cell", "0", "--store", name, "--no-report")
            assert fp8bench("suite", *cell)[0] == 0
        assert fp8bench("fleet", "collect", "plan.json", *stores, "--store", "all")[0] == 0
        code, out, _ = fp8bench("fleet", "report", "all", "--json")
    named = {(one["machine"], one["what"]) for one in json.loads(out)["alarms"]}
    assert code == 3 and ("slow", "slow") in named, out
    assert {machine for machine, what in named if "bits" in what} == {"corrupt"}, out
