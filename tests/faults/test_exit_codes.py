"""Exit codes for refused and failed cases, alone and among others."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from fp8bench import pipeline
from fp8bench.cli.main import main
from fp8bench.measure.handle import LocalWorker
from fp8bench.model import Level, Status
from fp8bench.store.runs.listing import run_files
from fp8bench.store.runs.run_file import load_run

SMALL = ("--set", "operation=residual", "--set", "tokens=8", "--set", "width=8", "--rounds", "1")
HANGING = """
import time

from fp8bench.suites import Work, Workload, workloads


@workloads.register("hanging")
class Hanging(Workload):
    name = "hanging"
    summary = "in bf16 its third step never ends"

    def axes(self, facts):
        return ()

    def work(self, params):
        return Work(1.0)

    def prepare(self, setup):
        return {"hangs": setup.case.precision == "bf16", "steps": 0}

    def step(self, state, phase):
        state["steps"] += 1
        with phase.gemm:
            time.sleep(600 if state["hangs"] and state["steps"] == 3 else 0.005)
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(("dtypes", "code"), [("fp32,fp8", 0), ("fp8", 3)])
def test_a_refused_precision_is_a_row(
    dtypes: str, code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(pipeline, "ProcessWorker", LocalWorker)
    assert main(["suite", "norm_act", "--dtypes", dtypes, *SMALL]) == code
    shown = capsys.readouterr()
    shown_text = " ".join(shown.out.split())
    assert "refused" in shown_text and "in fp8 only products have low precision, and bf16 computes" in shown_text
    (path,) = run_files(Path(".fp8bench"))
    refused = [record for record in load_run(path).records if record.support.level is Level.REFUSED]
    assert refused and all(record.status is Status.SKIPPED and record.reason for record in refused)


@pytest.mark.slow
def test_a_case_that_hangs_past_its_limit_fails_alone(capsys: pytest.CaptureFixture[str], folder: Path) -> None:
    (folder / "hanging.py").write_text(HANGING)
    words = ["suite", "./hanging.py", "--dtypes", "fp32,bf16", "--rounds", "3", "--case-timeout", "8"]
    assert main(words) == 3
    told = " ".join(capsys.readouterr().out.split())
    assert "FAILED: bf16 on hanging: no answer to 'slot' within 8 s" in told and "--case-timeout" in told
    (path,) = run_files(Path(".fp8bench"))
    statuses = {record.case.precision: record.status for record in load_run(path).records}
    assert statuses == {"fp32": Status.OK, "bf16": Status.FAILED}


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="the limit is kept by Linux alone")
@pytest.mark.parametrize("words", [("suite", "gemm", "--quick"), ("train", "--quick")], ids=lambda words: words[0])
def test_too_little_memory_gives_a_message(words: tuple[str, ...], tmp_path: Path) -> None:
    """Too little to import torch. A surviving process would keep the output open for ever."""
    process = subprocess.Popen(
        ("sh", "-c", 'ulimit -v 400000; exec "$@"', "sh", sys.executable, "-m", "fp8bench", *words, "--store", "store"),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).resolve().parents[2])},
    )
    out, err = process.communicate(timeout=300)
    assert (process.returncode, out) == (3, "") and err.startswith("fp8bench: ") and "Traceback" not in err
