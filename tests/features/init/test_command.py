"""`fp8bench init`: what it writes runs, and takes the place of nothing."""

from __future__ import annotations

import io
import re
import shutil
from pathlib import Path

import pytest

from fp8bench import __version__, pipeline
from fp8bench.cli.config_file import read_config
from fp8bench.cli.main import build_parser, main, subparsers_by_name
from fp8bench.features.init import command, source
from fp8bench.measure.handle import LocalWorker
from fp8bench.store.runs.listing import run_files
from fp8bench.store.runs.run_file import load_run
from tests.commands import ROOT, Say, unfolding
from tests.counts import for_each
from tests.own_suites import forgotten
from tests.workflows import commands, faults, load

FILES = ("fp8bench.yaml", "fp8bench_suite.py", ".github/workflows/fp8bench.yml")


@pytest.fixture
def written(store: Path, fp8bench: Say) -> Path:
    code, out, err = fp8bench("init")
    assert (code, err) == (0, "") and [line for line in out.splitlines() if line in FILES] == list(FILES)
    return Path()


def test_the_commands_it_names_run_where_its_files_are(store: Path, fp8bench: Say) -> None:
    assert "cd 'a project'" in fp8bench("init", "a project")[1]
    assert "cd " not in fp8bench("init")[1]


# A configuration line that sets an option, possibly commented out.
OPTION = re.compile(r"^(?:# )?(\w+): ", re.MULTILINE)


def test_the_configuration_shows_five_options_and_where_the_others_are(written: Path) -> None:
    text = Path("fp8bench.yaml").read_text()
    assert OPTION.findall(text) == ["suite", "dtypes", "devices", "set", "budget"]
    assert "fp8bench suite --help-all" in text and (ROOT / "docs" / "commands.md").is_file() and "docs/commands" in text


@pytest.mark.slow
@for_each("every", [False, True])
def test_the_written_configuration_runs(
    every: bool, written: Path, fp8bench: Say, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(pipeline, "ProcessWorker", LocalWorker)
    shutil.rmtree(".fp8bench", ignore_errors=True)
    if every:
        taken = OPTION.sub(lambda match: f"{match[1]}: ", Path("fp8bench.yaml").read_text())
        Path("fp8bench.yaml").write_text(taken)
        values = read_config(Path("fp8bench.yaml"), subparsers_by_name(build_parser(("suite",)))["suite"])
        assert (values["devices"], values["axes"], values["budget"]) == (("cpu",), [("tokens", ("64", "1024"))], 60)
    with forgotten(Path.cwd()):
        code, out, err = fp8bench("suite", "--config", "fp8bench.yaml", "--quick", "--set", "tokens=64", "--no-report")
    assert code == 0, out + err
    (path,) = run_files(Path(".fp8bench"))
    run = load_run(path)
    assert run.ok and {record.case.precision for record in run.records} == {"fp32", "bf16", "fp8"}
    errors = {record.case.precision: record.measurement("softmax_error") for record in run.records}
    assert all(error is not None and 0 <= error.samples[0] < 0.2 for error in errors.values())


@for_each(
    ("before", "after"),
    [
        (None, ".fp8bench/\n"),
        ("*.pyc", "*.pyc\n.fp8bench/\n"),
        ("a\n.fp8bench/\nb", "a\n.fp8bench/\nb"),
    ],
)
def test_git_ignores_the_store(before: str | None, after: str, tmp_path: Path, fp8bench: Say) -> None:
    project = tmp_path / str(after.count("\n")) / str(len(after))
    project.mkdir(parents=True)
    if before is not None:
        (project / ".gitignore").write_text(before)
    assert fp8bench("init", str(project))[0] == 0
    assert (project / ".gitignore").read_text() == after


def test_the_workflow_has_no_fault(store: Path, fp8bench: Say) -> None:
    path, requirement = Path(FILES[2]), 'git+https://a.b/c.git@v1 "; echo # {install}'
    assert fp8bench("init", "--install", requirement)[0] == 0
    assert load(path)["jobs"]["compare"]["steps"][2]["env"] == {"FP8BENCH": requirement}
    assert faults(load(path), path.read_text()) == []
    ((gate, *words),) = commands(load(path), "fp8bench")
    assert gate == "gate" and {"--against", "--config", "--comment"} <= set(words)


@for_each(
    ("recorded", "named"),
    [
        ('{"url": "https://a.b/c.git", "vcs_info": {"vcs": "git", "commit_id": "12ab"}}', "git+https://a.b/c.git@12ab"),
        (
            '{"url": "https://a.b/c.git", "vcs_info": {"commit_id": "12ab"}, "subdirectory": "py"}',
            "git+https://a.b/c.git@12ab#subdirectory=py",
        ),
        ('{"url": "https://a.b:8443/x.whl", "archive_info": {}}', "https://a.b:8443/x.whl"),
        ('{"url": "file:///tmp/x.whl", "archive_info": {}}', ""),
        ('{"url": "file:///nowhere/at%20all", "dir_info": {"editable": true}}', ""),
        ("{", ""),
        ("[]", ""),
        ('{"url": "https://a.b:x/c.git", "vcs_info": {"commit_id": "12ab"}}', ""),
    ],
)
def test_the_workflow_installs_what_this_installation_is_from(recorded: str, named: str) -> None:
    assert source.format_recorded_requirement(recorded) == named


@for_each(
    ("remote", "prefix", "branches", "named"),
    [
        ("https://token@a.b/o/r.git", "", "origin/main", "git+https://a.b/o/r.git@12ab"),
        ("git@a.b:o/r.git", "", "origin/main", "git+https://a.b/o/r.git@12ab"),
        ("ssh://git@a.b:2222/o/r.git", "", "origin/main", "git+https://a.b/o/r.git@12ab"),
        ("https://a.b/other.git", "vendor/fp8bench/", "origin/main", ""),
        ("https://a.b/o/r.git", "", "", ""),
    ],
)
def test_a_checkout_is_named_by_its_public_address(
    remote: str, prefix: str, branches: str, named: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A subfolder of another repository, or an unpushed commit, cannot be installed by CI."""
    answers = {"remote": remote, "rev-parse": "12ab", "branch": branches}

    def ask(folder: str, *question: str) -> str:
        return prefix if "--show-prefix" in question else answers[question[0]]

    monkeypatch.setattr(source, "_run_git", ask)
    assert source.format_recorded_requirement('{"url": "file:///a/b", "dir_info": {}}') == named


class Terminal(io.StringIO):
    """A stream that a person answers at."""

    def isatty(self) -> bool:
        return True


def installs(folder: str) -> str:
    """The arguments that a project's workflow passes to pip."""
    environment = load(Path(folder) / FILES[2])["jobs"]["compare"]["steps"][2]["env"]
    return str(environment["FP8BENCH"])


@for_each(
    ("answer", "installed", "problem"),
    [
        ("git+https://a.b/o/fp8bench@12ab\n", "git+https://a.b/o/fp8bench@12ab", ""),
        ("./wheels/own.whl\n", "./wheels/own.whl", ""),
        ("./no.whl\n", "./no.whl", "this project has no ./no.whl"),
        ("/tmp/fp8bench\n", "/tmp/fp8bench", "a CI build has no /tmp/fp8bench"),
        ("\n", f"fp8bench=={__version__}", "from a folder of this machine"),
        ("", f"fp8bench=={__version__}", "from a folder of this machine"),
    ],
)
def test_a_person_is_asked_once_where_no_build_can_reach_this_fp8bench(
    answer: str, installed: str, problem: str, store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.rmtree("project", ignore_errors=True)
    Path("project/wheels").mkdir(parents=True)
    Path("project/wheels/own.whl").touch()
    terminal = Terminal()
    monkeypatch.setattr(command, "find_source", lambda: "")
    monkeypatch.setattr(command.sys, "stdin", Terminal(answer))
    monkeypatch.setattr(command.sys, "stdout", terminal)
    assert main(["init", "project"]) == 0
    said = terminal.getvalue()
    assert said.count("?") == 1 and installs("project") == installed
    assert f"Builds install:     {installed}\n" in said and problem in said and ("push:" in said) is bool(problem)


@for_each("known", ["git+https://a.b/o/fp8bench@12ab", ""])
def test_without_a_terminal_nobody_is_asked(
    known: str, store: Path, fp8bench: Say, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command, "find_source", lambda: known)
    folder = f"project{bool(known)}"
    code, out, _ = fp8bench("init", folder)
    installed = known or f"fp8bench=={__version__}"
    assert code == 0 and "?" not in out and f"Builds install:     {installed}\n" in out
    assert installs(folder) == installed and ("Before you push:" in out) is not bool(known)


@for_each("existing", FILES)
def test_existing_files_are_never_overwritten(existing: str, store: Path, tmp_path: Path, fp8bench: Say) -> None:
    file = tmp_path / "project" / existing
    file.parent.mkdir(parents=True)
    file.symlink_to("nowhere")
    code, out, err = unfolding(fp8bench)("init", str(tmp_path / "project"))
    assert (code, out) == (2, "") and "exists already" in err
    assert [path for path in (tmp_path / "project").rglob("*") if not path.is_dir()] == [file]


def test_an_unwritable_folder_is_refused(store: Path, fp8bench: Say) -> None:
    Path("file").touch()
    code, _, err = unfolding(fp8bench)("init", "file")
    assert code == 2 and "cannot be written" in err
