"""`--max-batch` as a person uses it: by the command line, in a file of options, from Python, and gone on with."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest

from fp8bench import pipeline
from fp8bench.cli.main import main
from fp8bench.measure.capacity import CapacityPass
from fp8bench.measure.handle import LocalWorker
from fp8bench.model import Run
from fp8bench.store.runs.listing import run_files
from fp8bench.store.runs.run_file import load_run

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="RLIMIT_DATA is kept by Linux alone")
SMALL = ("--set", "width=64", "--set", "hidden=128", "--set", "gated=no", "--quick", "--no-energy", "--no-report")
WORDS = ("suite", "mlp", "--devices", "cpu", "--dtypes", "fp32,bf16", *SMALL)


@pytest.fixture(autouse=True)
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty working directory, with no other process to wait for."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(pipeline, "ProcessWorker", LocalWorker)
    return tmp_path / ".fp8bench"


def kept(store: Path) -> Run:
    (path,) = run_files(store)
    return load_run(path)


@pytest.mark.slow
def test_a_run_ends_with_the_largest_batch(store: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*WORDS, "--set", "tokens=32,64", "--max-batch", "2MiB"]) == 0
    shown = capsys.readouterr().out
    assert "largest batch (tokens) that fits into 2.00 MiB" in shown and re.search(r"bf16 +\d+  1\.\d+x", shown)
    run = kept(store)
    assert run.request.memory_limit == 2 << 20
    found = [one.capacity for one in run.records]
    assert [one is None for one in found] == [False, False, True, True]
    for one in found[:2]:
        assert one is not None and one.batch and one.beyond == one.batch + 1 and one.tokens == one.batch
        assert one.peak is not None and 0.97 * (2 << 20) < one.peak <= 2 << 20 and "more" in one.why


def test_a_limit_below_a_single_state_gives_zero(store: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*WORDS, "--set", "tokens=32", "--max-batch", "4KiB", "--json"]) == 0
    records = json.loads(capsys.readouterr().out)["records"]
    assert [one["capacity"]["batch"] for one in records] == [0, 0]
    assert all(one["capacity"]["beyond"] == 1 and one["timing"] for one in records)


@pytest.mark.slow
def test_a_run_that_was_cut_off_goes_on_searching(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    search = CapacityPass.find_largest_batches

    def interrupted(self: CapacityPass, outcomes: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(CapacityPass, "find_largest_batches", interrupted)
    words = [*WORDS, "--set", "tokens=32", "--max-batch", "2MiB"]
    assert main(words) == 130
    assert not kept(store).records
    monkeypatch.setattr(CapacityPass, "find_largest_batches", search)
    assert main(["suite", "--resume", "last", "--no-report"]) == 0
    assert all(one.capacity is not None and one.capacity.batch for one in kept(store).records)
