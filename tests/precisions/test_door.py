"""Modes on the command line, in plans, files and traces. Invalid ones are in tests/faults."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest

from fp8bench import pipeline
from fp8bench.cli.main import main
from fp8bench.measure.handle import LocalWorker
from fp8bench.model import Case
from fp8bench.model.file_names import name_case_file

MODES = ("bf16", "fp8-delayed:history=16:margin=1", "custom:format=e3m2:scaling=row:weight-gradient=bf16")


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(pipeline, "ProcessWorker", LocalWorker)
    return tmp_path


def test_a_plan_has_each_mode_once_by_its_own_word(capsys: pytest.CaptureFixture[str]) -> None:
    words = "fp8-delayed:margin=1:history=16,bf16,fp8-delayed:history=16:margin=1,fp4:stochastic=on,nvfp4"
    layers = "up=mxfp8:scale=floor,down=fp4:scale=nearest"
    options = ("--dtypes", words, "--precision-map", layers, "--set", "gated=no", "--dry-run")
    assert main(["suite", "mlp", *options]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    layers, delayed = "{up=mxfp8:scale=floor,down=nvfp4}", "fp8-delayed:history=16:margin=1"
    assert f"one group: fp32 (reference), bf16, {delayed}{layers}, nvfp4{layers}" in shown


@pytest.mark.slow
def test_modes_with_options_stay_what_they_are_in_every_file(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--rounds", "2", "--set", "shape=16", "--dtypes", ",".join(MODES), "--reference", "bf16"]
    assert main(["suite", "gemm", *words, "--trace", "traces", "--csv", "tidy.csv", "--html", "page.html"]) == 0
    table = capsys.readouterr().out
    assert main(["show", "last", "--json"]) == 0
    stored = json.loads(capsys.readouterr().out)
    with (here / "tidy.csv").open() as tidy:
        rows = list(csv.DictReader(tidy))
    page = (here / "page.html").read_text()
    assert {row["precision"] for row in rows} == {row["mode"] for row in rows} == set(MODES)
    assert {row["case"].rpartition("/")[2] for row in rows} == set(MODES)
    assert all(mode in table and mode in page and mode in json.dumps(stored) for mode in MODES)
    folders = [folder.name for folder in (here / "traces").iterdir()]
    assert len(folders) == len(MODES) and not any(set(name) & set(":/") for name in folders)


def test_names_of_files_tell_modes_apart() -> None:
    modes = (
        *MODES,
        "fp8-delayed:history=16:margin=2",
        "fp8-delayed_history=16_margin=2",
        MODES[2].replace("3m2", "2m3"),
    )
    names = {name_case_file(Case("gemm", (("m", 16),), mode, "cpu")) for mode in modes}
    assert len(names) == len(modes) and not any(set(name) & set(':/\\"*?<>|') for name in names)
