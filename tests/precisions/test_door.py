"""Modes on the command line: one word each in plans, files and traces, and nonsense refused before anything begins."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest

from fp8bench import pipeline
from fp8bench.cli import main
from fp8bench.measure.handle import LocalWorker
from fp8bench.model import Case
from fp8bench.paths import name_of

MODES = ("bf16", "fp8-delayed:history=16:margin=1", "custom:format=e3m2:scaling=row:weight-gradient=bf16")


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty working directory, and the worker's answers without a process of its own."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(pipeline, "ProcessWorker", LocalWorker)
    return tmp_path


REFUSED = {
    "fp8-delay": "unknown dtype 'fp8-delay'. Did you mean 'fp8-delayed'?",
    "fp8-delayed:histroy=16": "unknown option of dtype fp8-delayed 'histroy'. Did you mean 'history'?",
    "bf16:history=16": "unknown option of dtype bf16 'history'. Known: none.",
    "fp8-delayed:history": "has no OPTION=VALUE behind a colon but 'history'. fp8-delayed takes history, algorithm,",
    "fp8-delayed:": "has no OPTION=VALUE behind a colon but ''.",
    "fp8:=3": "has no OPTION=VALUE behind a colon but '=3'.",
    "fp8-delayed:history=16:amax_history_len=8": "gives history twice. Keep one of the two.",
    "fp8-delayed:history=0": "history cannot be '0': expected a whole number from 1 to 65536.",
    "fp8-delayed:history=65537": "history cannot be '65537': expected a whole number from 1 to 65536.",
    "fp8-delayed:margin=-1": "margin cannot be '-1': expected a whole number from 0 to 32.",
    "fp8-delayed:interval=2.5": "interval cannot be '2.5': expected a whole number.",
    "fp8-delayed:algorithm=mostrecent": "expected one of max, most_recent; the nearest is 'most_recent'.",
    "mxfp8:scale=flor": "scale cannot be 'flor': expected one of floor, even, ceil, rceil; the nearest is 'floor'.",
    "nvfp4:weight-gradient=bf16": "Hadamard turns the operands of the weight gradient, and here it stays in bf16",
    "mxfp4:hadamard=on:gw=bf16": "mxfp4:hadamard=on:weight-gradient=bf16: Hadamard turns the operands",
    "custom:format=e5m2:scaling=nvfp4": "NVFP4's scales are for e2m1 elements, not for e5m2.",
    "custom:weight=e5m2:format=e2m1:scaling=nvfp4": "NVFP4's scales are for e2m1 elements, not for e5m2.",
    "custom:format=bf16:scaling=mx": "MX blocks hold e4m3fn, e5m2, e3m2, e2m3, e2m1, not bf16.",
    "custom:scaling=1x64": "scaling cannot be '1x64': expected one of none, tensor, row, 1x128, 128x128, mx, nvfp4",
    "custom:scaling=mx:scale=exact": "scales in e8m0 are not rounded by exact. Give floor, even, ceil, rceil.",
    "custom:scaling=none:scale=exact": "scaling=none leaves scale=exact nothing to round: leave one out.",
    "custom:format=e8m0": "format cannot be 'e8m0': expected one of e4m3fn,",
    "custom:format=int8": "format cannot be 'int8': expected one of e4m3fn,",
}


@pytest.mark.parametrize("word", REFUSED)
def test_what_cannot_be_is_refused_in_one_sentence(word: str, here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """As a precision, as the reference and in a map; exit 2, no line on stdout, no file."""
    for options in (["--dtypes", f"bf16,{word}"], ["--reference", word], ["--precision-map", f"mlp={word}"]):
        assert main(["suite", "transformer", *options]) == 2
        shown = capsys.readouterr()
        assert not shown.out and shown.err.startswith("fp8bench: ") and shown.err.count("\n") == 1
        assert REFUSED[word] in shown.err and shown.err.endswith(".\n")
    assert not list(here.iterdir())


def test_a_plan_has_each_mode_once_by_its_own_word(capsys: pytest.CaptureFixture[str]) -> None:
    """Whatever aliases and defaults it was written with."""
    words = "fp8-delayed:fp8_margin=1:amax_history_len=16,bf16,fp8-delayed:history=16:margin=1,fp4:stochastic=on,nvfp4"
    assert main(["suite", "mlp", "--dtypes", words, "--precision-map", "up=mxfp8:scale=floor,down=fp4:scale=nearest",
                 "--set", "gated=no", "--dry-run"]) == 0  # fmt: skip
    shown = " ".join(capsys.readouterr().out.split())
    layers, delayed = "{up=mxfp8:scale=floor,down=nvfp4}", "fp8-delayed:history=16:margin=1"
    assert f"one group: bf16 (reference), {delayed}{layers}, nvfp4{layers}" in shown


def test_modes_with_options_stay_what_they_are_in_every_file(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Table, JSON, CSV, the stored run, the report, and folders of traces."""
    words = ["--rounds", "2", "--set", "shape=16", "--dtypes", ",".join(MODES), "--trace", "traces"]
    assert main(["suite", "gemm", *words, "--csv", "tidy.csv", "--html", "page.html"]) == 0
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
    """Also those that are cut, and those that differ in a letter that no file's name may have."""
    modes = (
        *MODES,
        "fp8-delayed:history=16:margin=2",
        "fp8-delayed_history=16_margin=2",
        MODES[2].replace("3m2", "2m3"),
    )
    names = {name_of(Case("gemm", (("m", 16),), mode, "cpu")) for mode in modes}
    assert len(names) == len(modes) and not any(set(name) & set(':/\\"*?<>|') for name in names)
