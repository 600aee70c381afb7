"""A fleet on the command line: plan, cells, workers that are killed, and where everything stands."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path
from typing import Any

import pytest

from suites import fleet
from tests.commands import Say
from tests.older import changed_document

GEMM = "gemm --quick --no-energy --rounds 2 --dtypes fp32 --no-isolation --set shape=16,32,48"


@pytest.fixture
def plan(store: Path, fp8bench: Say, tmp_path: Path) -> Path:
    """Three cells that take no time."""
    code, out, err = fp8bench("suite", *GEMM.split(), "--dry-run", "--write-plan", str(tmp_path / "plan.json"))
    assert code == 0 and "groups: 3" in out and "3 cells" in err
    return tmp_path / "plan.json"


def test_from_plan_to_status(plan: Path, fp8bench: Say) -> None:
    """One cell by itself, and where all stand; a program reads the same."""
    code, out, _ = fp8bench("suite", "--plan", str(plan), "--cell", "2", "--no-report")
    assert code == 0 and "gemm m=48" in out
    code, _, err = fp8bench("suite", "--plan", str(plan), "--cell", "2", "--no-report")
    assert code == 0 and "is done: run" in err
    code, out, _ = fp8bench("fleet", "status", str(plan))
    assert code == 3 and "1 done, 2 waiting." in out and "Of 3 cases 1 were measured, on " in " ".join(out.split())
    _, out, _ = fp8bench("fleet", "status", str(plan), "--json")
    states = json.loads(out)["cells"]
    _, out, _ = fp8bench("fleet", "status", str(plan), "--csv", "-")
    rows = list(csv.DictReader(io.StringIO(out)))
    assert [one["status"] for one in states] == [row["status"] for row in rows] == ["waiting", "waiting", "done"]
    assert rows[2]["run"] == states[2]["run"] and rows[2]["setting"] == states[2]["cell"]["setting"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--plan", "PLAN"), "--plan and --cell go together"),
        (("--cell", "1"), "--plan and --cell go together"),
        (("--plan", "PLAN", "--cell", "3"), "cell 3 is not one of 0 to 2"),
        (("--plan", "PLAN", "--cell", "0", "--quick"), "the plan of --plan says what to measure and how, and --quick"),
        (("gemm", "--plan", "PLAN", "--cell", "0"), "and gemm was given too"),
        (("gemm", "--write-plan", "other.json"), "--write-plan goes with --dry-run"),
        (("--plan", "nowhere.json", "--cell", "0"), "the plan nowhere.json cannot be read"),
        (("gemm", "--dry-run", "--write-plan", "."), "--write-plan '.' cannot be written: it is a directory"),
        (("gemm", "--dry-run", "--write-plan", "PLAN/x"), "cannot be written"),
    ],
)
def test_nonsense(plan: Path, fp8bench: Say, words: tuple[str, ...], said: str) -> None:
    code, _, err = fp8bench("suite", *(word.replace("PLAN", str(plan)) for word in words))
    assert code == 2 and said in " ".join(err.split())


def test_nonsense_for_fleets(plan: Path, fp8bench: Say) -> None:
    for words, said in (
        (("export", str(plan), "--to", "sbatch", "-o", "."), "--output '.' cannot be written: it is a directory"),
        (("status", str(plan), "--store", str(plan)), "is a file, expected a folder"),
    ):
        code, _, err = fp8bench("fleet", *words)
        assert code == 2 and said in " ".join(err.split())


def test_a_worker_says_what_came_of_it(plan: Path, fp8bench: Say, tmp_path: Path) -> None:
    """Also where nothing waits, and why a cell failed."""
    code, _, err = fp8bench("suite", "--plan", str(plan), "--cell", "1", "--no-report")
    assert code == 0
    code, _, err = fp8bench("fleet", "work", str(plan), "--cell", "1")
    assert code == 0 and "0 of 3 cells measured here; 1 done, 2 waiting" in " ".join(err.split())
    content: dict[str, Any] = changed_document(plan)
    content["fleet"]["request"]["suite"], content["fleet"]["id"] = "nosuch", "abcd"
    (tmp_path / "other.json").write_text(json.dumps(content))
    code, _, err = fp8bench("fleet", "work", str(tmp_path / "other.json"), "--cell", "0")
    told = " ".join(err.split())
    assert code == 3 and "cell 0 failed: unknown suite 'nosuch'" in told and "1 failed, 2 waiting" in told


@pytest.mark.parametrize("words", [("work",), ("work", "--workers", "2"), ("submit", "--on", "local")])
def test_a_store_that_cannot_be_written(plan: Path, fp8bench: Say, tmp_path: Path, words: tuple[str, ...]) -> None:
    """Is refused before anybody begins; root may write everywhere but below a file."""
    (tmp_path / "file").write_text("")
    code, _, err = fp8bench("fleet", words[0], str(plan), *words[1:], "--store", str(tmp_path / "file" / "store"))
    assert code == 2 and "cannot be written" in " ".join(err.split())


def test_the_look_that_is_offered_can_be_had(plan: Path, fp8bench: Say) -> None:
    _, out, _ = fp8bench("fleet", "status", str(plan))
    assert "--explain says how to read this" in out
    code, out, _ = fp8bench("fleet", "status", str(plan), "--explain")
    assert code == 3 and "begun: a run was cut off" in " ".join(out.split())


def test_the_makespan_beside_the_cells() -> None:
    """Four cells of 10 s, 6 of them measuring, by two workers in 22 s: 1.1 times half of their sum."""
    found = fleet.report(22.0, [fleet.Timed(10.0, 6.0)] * 4, 2)
    assert found["ratio"] == 1.1 and found["shortest_cell_s"] == 10.0
    assert found["overhead_a_cell_s"] == {"between_cells": 1.0, "in_its_process": 4.0}
    assert found["ratio_to_measuring_alone"] == pytest.approx(44 / 24)
