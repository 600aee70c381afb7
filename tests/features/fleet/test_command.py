"""A fleet on the command line: plan, cells, workers that are killed, and where everything stands."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.commands import Say
from tests.counts import for_each
from tests.older import changed_document


def test_a_plan_is_worked_on_and_its_status_printed(plan: Path, fp8bench: Say) -> None:
    for text in ("gemm (48 x 48 x 48", "is done: run"):
        code, out, err = fp8bench("suite", "--plan", str(plan), "--cell", "2", "--no-report")
        assert code == 0 and text in out + err
    code, out, _ = fp8bench("fleet", "status", str(plan))
    assert code == 3 and "1 done, 2 waiting." in out


@for_each(
    ("command", "words", "message"),
    [
        ("suite", "--plan PLAN", "--plan FILE and --cell NUMBER only work together"),
        ("suite", "--cell 1", "--plan FILE and --cell NUMBER only work together"),
        ("suite", "--plan PLAN --cell 3", "cell 3 is not among the cells 0 to 2"),
        ("suite", "--plan PLAN --cell 0 --quick", "and --quick"),
        ("suite", "gemm --plan PLAN --cell 0", "and gemm was given too"),
        ("suite", "gemm --write-plan other.json", "--write-plan only works with --dry-run"),
        ("suite", "--plan nowhere.json --cell 0", "nowhere.json cannot be read"),
        ("suite", "gemm --dry-run --write-plan .", "it is a directory"),
        ("suite", "gemm --dry-run --write-plan PLAN/x", "cannot be written"),
        ("fleet", "status PLAN --store PLAN", "is a file, expected a folder"),
        # Before the work begins; root can write anywhere except below a file.
        ("fleet", "work PLAN --store PLAN/store", "cannot be written"),
        ("fleet", "work PLAN --workers 2 --store PLAN/store", "cannot be written"),
        ("fleet", "submit PLAN --on slurm --store PLAN/store", "cannot be written"),
    ],
)
def test_bad_arguments_are_refused(plan: Path, fp8bench: Say, command: str, words: str, message: str) -> None:
    code, _, err = fp8bench(command, *words.replace("PLAN", str(plan)).split())
    assert code == 2 and message in " ".join(err.split())


def test_a_worker_reports_its_results(plan: Path, fp8bench: Say, tmp_path: Path) -> None:
    assert fp8bench("suite", "--plan", str(plan), "--cell", "1", "--no-report")[0] == 0
    code, _, err = fp8bench("fleet", "work", str(plan), "--cell", "1")
    assert code == 0 and "0 of 3 cells measured here; 1 done, 2 waiting" in " ".join(err.split())
    content: dict[str, Any] = changed_document(plan)
    content["fleet"]["request"]["suite"], content["fleet"]["id"] = "nosuch", "abcd"
    (tmp_path / "other.json").write_text(json.dumps(content))
    code, _, err = fp8bench("fleet", "work", str(tmp_path / "other.json"), "--cell", "0")
    printed = " ".join(err.split())
    assert code == 3 and "cell 0 failed: unknown suite 'nosuch'" in printed and "1 failed, 2 waiting" in printed
