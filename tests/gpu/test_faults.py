"""Faults planted between torch and the CUDA runtime, through whole suites. Skipped without a GPU."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from fp8bench.api import load
from fp8bench.measure.passes import OUT_OF_MEMORY
from fp8bench.model import Record, Run, Status
from fp8bench.model.raw import PRODUCT_CHECKS_VARIABLE
from tests.commands import ROOT

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(shutil.which("gcc") is None, reason="needs gcc")]
SOURCE = Path(__file__).with_name("faults.c")
SUITE = ("suite", "mlp", "--quick", "--no-energy", "--no-report", "--devices", "cuda", "--dtypes", "fp32,bf16,fp8")
AXES = ("--set", "gated=no", "--set", "pass=training", "--set", "tokens=1024,2048", "--set", "width=1024")


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("faults") / "faults.so"
    subprocess.run(["gcc", "-shared", "-fPIC", "-O1", "-o", str(path), str(SOURCE), "-ldl"], check=True)
    maps = subprocess.run(
        ["cat", "/proc/self/maps"],
        env={**os.environ, "LD_PRELOAD": str(path)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert path.name in maps.stdout, f"the loader does not preload it, perhaps because of noexec: {maps.stderr}"
    return path


def run_with(fault: str, library: Path, folder: Path) -> Run:
    preloaded = [str(library), *os.environ.get("LD_PRELOAD", "").split()]
    environment = {
        **os.environ,
        "LD_PRELOAD": ":".join(preloaded),
        "FAULT": fault,
        "FAULT_ONCE": str(folder / "struck"),
        PRODUCT_CHECKS_VARIABLE: "unchecked",
        "PYTHONPATH": str(ROOT),
    }
    done = subprocess.run(
        [sys.executable, "-m", "fp8bench", *SUITE, *AXES, "--store", "store"],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert (folder / "struck").exists(), f"exit {done.returncode}\n{done.stdout}\n{done.stderr}"
    return load("last", folder / "store")


def failed(run: Run) -> list[Record]:
    assert run.finished and len(run.records) == 6
    return [record for record in run.records if record.status is Status.FAILED]


@pytest.mark.parametrize(
    ("code", "words"),
    [(710, "device-side assert triggered"), (700, "an illegal memory access"), (214, "uncorrectable ECC error")],
)
def test_a_broken_context_costs_one_case(code: int, words: str, library: Path, tmp_path: Path) -> None:
    run = run_with(f"launch:3000:{code}", library, tmp_path)
    told = [record.reason or record.detail for record in run.records if words in record.reason + record.detail]
    assert len(told) == 1 and len(failed(run)) <= 1
    assert all(record.timing is not None for record in run.records if record.status is Status.OK)


def test_a_gpu_that_is_gone_is_tried_no_more(library: Path, tmp_path: Path) -> None:
    run = run_with("gone:3000:719", library, tmp_path)
    struck, *others = sorted(failed(run), key=lambda one: "fresh process" in one.reason)
    assert "unspecified launch failure" in struck.reason
    assert others and all("does not answer a fresh process either" in item.reason for item in others)


@pytest.mark.parametrize("fault", ["malloc:20:2", "create:1:3"])
def test_memory_that_ends_for_a_moment_fails_nobody(fault: str, library: Path, tmp_path: Path) -> None:
    run = run_with(fault, library, tmp_path)
    assert not failed(run) and OUT_OF_MEMORY not in [record.reason for record in run.records]


def test_a_product_that_is_refused_is_a_row_with_the_reason(library: Path, tmp_path: Path) -> None:
    run = run_with("product:3:15", library, tmp_path)
    told = [record for record in run.records if "CUBLAS_STATUS_NOT_SUPPORTED" in record.reason]
    assert told and all(item.status is not Status.OK for item in told)
