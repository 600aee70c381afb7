"""Runs that were stored by earlier versions are still read, shown, compared, judged and resumed, with the same words.

The runs are real: gemm's grid at two commits, one with cases that failed, and the one of reports/sample, whose requests
lack what was added later. After a wanted change `python -m tests.golden.test_stored_runs` writes what is expected anew;
read its diff.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import pytest

from fp8bench.cli.main import main
from tests.counts import for_each

ROOT = Path(__file__).resolve().parents[2]
STORED = ROOT / "tests" / "golden" / "stored"
EXPECTED = STORED / "expected"
OLD, NEW, FAILING, SAMPLE = "97a62823", "c1fdadfa", "de0b9da3", "a95c7ff0"
SERIES = "gemm.Gemm.track_time(bf16, 512)"
# What each file is of: the words of a command, which prints it or writes it to the file that its words name.
COMMANDS = {
    "old.txt": f"show {OLD}",
    "old.csv": f"show {OLD} --csv -",
    "old.json": f"show {OLD} --json",
    "old.md": f"report {OLD} --md old.md",
    "failing.txt": f"show {FAILING}",
    "failing.csv": f"show {FAILING} --csv -",
    "failing.md": f"report {FAILING} --md failing.md",
    "sample.txt": f"show {SAMPLE}",
    "sample-all.txt": f"show {SAMPLE} --all",
    "failing-all.txt": f"show {FAILING} --all",
    "sample.md": f"report {SAMPLE} --md sample.md",
    "compared.txt": f"compare {OLD} {NEW}",
    "compared.csv": f"compare {OLD} {NEW} --csv -",
    "compared.md": f"compare {OLD} {NEW} --md compared.md",
    "gate.txt": f"gate {OLD} {NEW} --no-rerun",
    "gate.xml": f"gate {OLD} {NEW} --no-rerun --junit gate.xml",
    "runs.txt": "history list --runs",
    "series.txt": "history list",
    "rebuilt.txt": "history rebuild",
}
WIDE = {f"{name}-wide.csv": run for name, run in (("old", OLD), ("failing", FAILING), ("sample", SAMPLE))}
VIEWS = ("359f21c3", "7eccd2d9")


@contextlib.contextmanager
def a_store_of_them(folder: Path) -> Iterator[None]:
    """A working directory in no repository, with the runs in its store, and a terminal of 100 columns."""
    runs = folder / ".fp8bench" / "runs"
    shutil.copytree(STORED / "runs", runs)
    sample = runs / "vm" / f"20261126T063842.925Z-08bd5754-{SAMPLE}.jsonl"
    sample.parent.mkdir()
    shutil.copy(ROOT / "reports" / "sample" / "run.jsonl", sample)
    facts = {"GIT_CEILING_DIRECTORIES": str(folder.parent), "COLUMNS": "100", "NO_COLOR": "1"}
    with contextlib.chdir(folder), mock.patch.dict(os.environ, facts), mock.patch.object(sys, "path", list(sys.path)):
        os.environ.pop("GITHUB_STEP_SUMMARY", None)  # the gate would write there
        yield


def told(words: list[str]) -> str:
    """What a command prints and, where it is not 0, its exit code."""
    with contextlib.redirect_stdout(io.StringIO()) as out:
        code = main(words)
    return out.getvalue() + (f"exit code {code}\n" if code else "")


def everything(folder: Path) -> dict[str, str]:
    """What there is to compare, by the names of the files that hold it."""
    found = {}
    with a_store_of_them(folder):
        for name, words in COMMANDS.items():
            said = told(words.split())
            found[name] = Path(name).read_text(encoding="utf-8") if words.endswith(name) else said
        resumed = told(["suite", "--resume", SAMPLE]).splitlines()
        others = [line for line in resumed if not line.startswith("  report: ")]  # it was written meanwhile
        assert others == [line for line in found["sample.txt"].splitlines() if not line.startswith("  stored in ")]
        found["one-series.txt"] = told(["history", "show", SERIES])
        for name, run in WIDE.items():
            (path,) = Path(".fp8bench/runs").rglob(f"*-{run}.jsonl")
            told(["report", str(path), "--store", name, "--csv-wide"])
            found[name] = next(Path(name).rglob("results.csv")).read_text(encoding="utf-8")
        for commit in VIEWS:
            (path,) = Path(".fp8bench/asv/results/box").glob(f"{commit}-*.json")
            found[f"asv-{commit}.json"] = path.read_text(encoding="utf-8")
    return found


def rounded(text: str) -> str:
    """Numbers of many digits, to nine: the last ones are those of a processor's vector instructions."""
    return re.sub(r"\d+\.\d{8,}(?:e[-+]?\d+)?", lambda number: f"{float(number[0]):.9g}", text)


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return everything(tmp_path_factory.mktemp("stored"))


@pytest.mark.parametrize("name", sorted(path.name for path in EXPECTED.iterdir()))
def test_it_is_told_as_before(name: str, found: dict[str, str]) -> None:
    assert rounded(found[name]) == rounded((EXPECTED / name).read_text(encoding="utf-8"))


def test_nothing_is_left_out(found: dict[str, str]) -> None:
    """What is rendered and has no file would never be compared."""
    assert set(found) == {path.name for path in EXPECTED.iterdir()}


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as made:
        for name, text in everything(Path(made)).items():
            (EXPECTED / name).write_text(text, encoding="utf-8")


@for_each("width", [60, 80, 100, 120])
@for_each("words", [one for file, one in COMMANDS.items() if file.endswith(".txt")])
def test_no_line_is_wider_than_the_terminal(
    words: str, width: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """As COLUMNS has it, where output is piped."""
    with a_store_of_them(tmp_path):
        monkeypatch.setenv("COLUMNS", str(width))
        main(words.split())
    assert all(len(line) <= width for line in capsys.readouterr().out.splitlines())
