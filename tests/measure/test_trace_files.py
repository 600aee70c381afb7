"""Where traces lie."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from fp8bench.measure.passes import TraceFolder, trace_folder
from fp8bench.model import Case, Request
from tests.runs import gemm

CASE = Case("gemm", (("m", 512), ("n", 512)), "bf16", "cuda:0")


def test_a_folder_for_each_case_as_tensorboard_wants_it() -> None:
    folder = TraceFolder(Path("/traces"), 1767614400000)
    assert folder.file_of(CASE) == "gemm-m=512,n=512-cuda0-bf16/fp8bench.1767614400000.pt.trace.json.gz"


def test_the_runs_own_time_tells_it_from_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    run, _ = gemm()
    run = replace(run, request=Request("gemm", trace="traces"), started="2026-01-05T12:00:00.250+00:00")
    assert trace_folder(run) == TraceFolder(tmp_path / "traces", 1767614400250)
    assert trace_folder(replace(run, request=Request("gemm"))) is None
