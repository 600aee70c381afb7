"""Users' suites: the example of docs/user-suites.md, and messages on faulty files."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from fp8bench import pipeline
from fp8bench.asv_bridge import find_project, find_store
from fp8bench.cli.main import DEFAULT_STORE, main
from fp8bench.jobs import doctor
from fp8bench.measure.handle import LocalWorker
from fp8bench.model import Status
from fp8bench.plan.resolve import TAPE_VARIABLE
from fp8bench.store.runs.listing import run_files
from fp8bench.store.runs.run_file import load_run
from tests.commands import Say, git, only_sentence, unfolded
from tests.own_suites import adding_up, forgotten

ROOT = Path(__file__).resolve().parents[1]
PAGE = (ROOT / "docs" / "user-suites.md").read_text()
HISTORY = (ROOT / "docs" / "history.md").read_text()


def example() -> str:
    """The page's example file."""
    return _blocks()[0]


def _blocks() -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)


def with_history() -> str:
    """The example with the page's grid."""
    head, grid = _blocks()[1].split("\n\n", 1)
    return f"{head}\n{example().replace('    def axes', f'{grid}{chr(10)}    def axes', 1)}"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty working directory; registrations and modules of its files are removed afterwards."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(pipeline, "ProcessWorker", LocalWorker)
    monkeypatch.setattr(doctor, "ProcessWorker", LocalWorker)
    with forgotten(tmp_path):
        yield tmp_path


@pytest.mark.slow
def test_the_example_of_the_page_runs_as_it_stands(tmp_path: Path) -> None:
    (tmp_path / "my_suite.py").write_text(example())
    words = "suite ./my_suite.py --quick --set experts=64 --dtypes fp8,bf16 --store kept --no-report --explain"
    done = subprocess.run(
        [sys.executable, "-W", "error", "-m", "fp8bench", *words.split()],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        stdin=subprocess.DEVNULL,
        env={**os.environ, "PYTHONPATH": str(ROOT), TAPE_VARIABLE: "recorded"},
    )
    assert (done.returncode, unfolded(done.stderr)) == (0, "")
    for word in ("routing", "experts 64", "bf16", "fp8", "cast", "matmul", "elementwise", "routing 0."):
        assert word in done.stdout
    (path,) = run_files(tmp_path / "kept")
    run = load_run(path)
    assert run.finished and not run.troubles
    errors = {record.case.precision: record.measurement("routing_error") for record in run.records}
    assert 0 < errors["bf16"].samples[0] < errors["fp8"].samples[0] < 0.2  # type: ignore[union-attr]
    assert [record.status for record in run.records] == [Status.OK] * 3
    for record in run.records:
        assert record.tape is not None
        assert {operator.phase for operator in record.tape.operators} <= {"cast", "gemm", "elementwise"}


def test_the_grid_of_the_page_fits_the_example(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "my_suite.py").write_text(with_history())
    assert main(["list", "./my_suite.py"]) == 0
    assert "the history keeps experts=64 in fp32, bf16 (--grid measures only these)" in capsys.readouterr().out
    for wrong in ('("64",)}, gpu', '("6x",)}, gpu'), ('phases=("cast"', 'phases=("casts"'):
        assert wrong[0] in with_history()
        (folder / "wrong.py").write_text(with_history().replace(*wrong).replace("routing", "wrong"))
        with forgotten(folder):
            assert main(["list", "./wrong.py"]) == 0
        said = capsys.readouterr().out
        assert "cannot be tracked" in said and "the history keeps" not in said
    (found,) = re.findall(r"^```json\n(.*?)^```", HISTORY, re.MULTILINE | re.DOTALL)
    (folder / "asv.conf.json").write_text(found)
    assert find_store(find_project(folder / "suites" / "routing.py")) == folder / DEFAULT_STORE


@pytest.mark.slow
def test_the_example_has_a_history(store: Path, fp8bench: Say) -> None:
    folder = Path.cwd()
    Path("my_suite.py").write_text(with_history())
    git(folder, "init", "-q")
    git(folder, "add", "my_suite.py")
    git(folder, "commit", "-qm", "a suite")
    lines = re.findall(
        r"^fp8bench (?:suite|history).*--(?:grid|import \S+)$", PAGE.partition("## Its history")[2], re.MULTILINE
    )
    with forgotten(folder):
        said = [fp8bench(*shlex.split(lines[0])[1:], "--rounds", "3", "--no-energy", "--no-report")]
        said += [fp8bench(*shlex.split(line)[1:]) for line in lines[1:]]
    assert [code for code, _, _ in said] == [0] * 3 and len(lines) == 3
    assert "2 cases of commit" in said[0][2] and "in the history" in said[0][2]
    told = ("time", "time_cast", "time_gemm", "time_elementwise", "seconds_per_mtok", "peak_memory", "routing_error")
    for name in told:
        assert f"routing.Routing.track_{name}(fp32, 64)" in said[1][1]
        assert f"routing.Routing.track_{name}(bf16, 64)" in said[1][1]
    assert "routing.Routing.track_time(bf16, 64)" in said[2][1] and git(folder, "rev-parse", "HEAD")[:8] in said[2][1]
    known = json.loads((store / "asv" / "results" / "benchmarks.json").read_text())
    assert known["routing.Routing.track_routing_error"]["param_names"] == ["dtype", "experts"]


SUITE = adding_up("counting", 1000)


def test_the_kernel_of_the_page_is_compared_and_tracked(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "kernel.py").write_text(_blocks()[2])
    assert main(["list", "./kernel.py"]) == 0
    assert "the history keeps side=512 in bf16, mine" in unfolded(capsys.readouterr().out)
    assert main(["suite", "./kernel.py", "--set", "side=64", "--rounds", "3", "--no-isolation", "--no-report"]) == 0
    out = capsys.readouterr().out
    assert "compared with bf16" in out and re.search(r"mine .* products 0\.\d+% off", out) and "fallback" not in out


@pytest.mark.parametrize("way", [["./mine.py"], ["counting", "--import", "mine"]], ids=["file", "module"])
def test_text_that_a_file_prints_stays_out_of_stdout(
    way: list[str], folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "mine.py").write_text(f'print("a word of the file\'s own")\n{SUITE}')
    assert main(["suite", *way, "--dtypes", "fp32", "--rounds", "3", "--no-isolation", "--json", "--no-report"]) == 0
    shown = capsys.readouterr()
    assert json.loads(shown.out) and unfolded(shown.err) == "a word of the file's own\n"


AS_GEMM = SUITE.replace('"counting"', '"gemm"')
# File: its content, and the expected message.
WRONG = {
    "syntax.py": ("def f(:", "SyntaxError: invalid syntax (syntax.py, line 1)"),
    "raises.py": ("x = 1\nraise ValueError('one\\ntwo ' * 200)", "failed: ValueError: one two one"),
    "deep.py": ("import json\n\njson.loads('{')", "(deep.py, line 3). Give"),
    "exits.py": ("import sys\nsys.exit()", "failed: SystemExit (exits.py, line 2)"),
    "exits_in_words.py": ("raise SystemExit('enough')", "failed: SystemExit: enough (exits_in_words.py, line 1)"),
    "missing.py": ("import no_such_module", "ModuleNotFoundError: No module named 'no_such_module' (missing.py, line"),
    "nothing.py": ("x = 1", "./nothing.py registers no suite"),
    "hidden.py": (SUITE.replace('"counting"', '"_counting"'), "./hidden.py registers no suite"),
    "binary.py": ("\0\0", "source code string cannot contain null bytes"),
    "taken.py": (AS_GEMM, "two suites are called 'gemm': fp8bench.workloads.gemm.Gemm"),
    "same_class.py": (AS_GEMM.replace("Counting", "Gemm"), "two suites are called 'gemm'"),
    "abstract.py": (SUITE.replace("def step", "def stride"), "the suite 'counting' lacks step"),
    "silent.py": (SUITE.replace("    summary =", "    other ="), "the suite 'counting' lacks summary"),
    "two_names.py": (SUITE.replace('name = "counting"', 'name = "adding"'), "registers as 'counting' and has name ="),
    "no_base.py": (SUITE.replace("(Workload)", ""), "the suite 'counting' is not a Workload"),
    "axes.py": (SUITE.replace("return (Axis", "return 1 + (Axis"), "cannot be planned: TypeError"),
    "work.py": (SUITE.replace("Work(1.0)", "Work(1 / 0)"), "ZeroDivisionError: division by zero (work.py, line 14)"),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_a_file_that_is_wrong_is_one_line_and_code_2(
    name: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    content, sentence = WRONG[name]
    (folder / name).write_text(content)
    assert main(["suite", f"./{name}"]) == 2
    shown = capsys.readouterr()
    line = only_sentence(shown.err)
    assert sentence in line
    assert line.startswith("fp8bench: ") and len(line) < 700
    assert not shown.out and not list(run_files(folder / ".fp8bench"))


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["./absent.py"], "no such file"),
        (["./folder.py"], "folder.py is a directory"),
        (["."], "the suite '.' is a path"),
        (["./folder"], "'./folder' is a path. Give a name, or a file that ends in .py"),
        (["net.py:make"], "`fp8bench profile net.py:make` and"),
        (["gemm,./absent.py"], "no such file"),
        (["gemm", "--import", "./absent.py"], "importing './absent.py' failed"),
        (["gemm", "--import", ".relative"], "importing '.relative' failed: TypeError"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_missing_file_is_refused(
    words: list[str], sentence: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "folder.py").mkdir()
    assert main(["suite", *words]) == 2
    shown = capsys.readouterr()
    assert sentence in only_sentence(shown.err) and not shown.out


def test_two_files_of_one_name_and_class_are_two(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("one", "two"):
        (folder / name).mkdir()
        (folder / name / "mine.py").write_text(SUITE)
    assert main(["suite", "./one/mine.py", "--import", "./two/mine.py"]) == 2
    assert "two suites are called 'counting'" in unfolded(capsys.readouterr().err)


@pytest.mark.slow
def test_the_suite_of_several_ranks_that_the_page_shows(tmp_path: Path) -> None:
    page = (ROOT / "docs" / "distributed.md").read_text()
    (code,) = re.findall(r"^```python\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    (tmp_path / "my_suite.py").write_text(code)
    words = ["suite", "./my_suite.py", "--ranks", "2", "--quick", "--rounds", "2", "--dtypes", "fp32,fp8"]
    command = [sys.executable, "-m", "fp8bench", *words, "--store", "store", "--no-report"]
    done = subprocess.run(
        command, cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True, check=True
    )
    assert "2 ranks" in done.stdout and "FAILED" not in done.stdout
