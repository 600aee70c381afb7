"""Python calls of commands: a call becomes command-line words, and its result has the printed data."""

from __future__ import annotations

import argparse
import inspect
import re
from pathlib import Path
from typing import Any

import pytest

import fp8bench
from fp8bench import CommandResult, api
from fp8bench.cli.calls import explain_arguments, make_command_call, python_keyword
from fp8bench.cli.main import build_parser, import_command_module, parse_command_words, subparsers_by_name
from fp8bench.errors import UnknownName, UsageError
from fp8bench.jobs.report_files import find_report_page
from tests.commands import Say
from tests.counts import for_each
from tests.runs import measured

CALLS = ("ablate", "advise", "audit", "compare", "duel", "gate", "sensitivity")


@pytest.fixture(name="command_line")
def command_line_fixture(request: pytest.FixtureRequest) -> Say:
    """The fixture `fp8bench` under a name that does not hide the package."""
    say: Say = request.getfixturevalue("fp8bench")
    return say


def asked(name: str, monkeypatch: pytest.MonkeyPatch, *words: Any, **given: Any) -> dict[str, Any]:
    """The arguments that a call passes to its command."""
    seen: list[argparse.Namespace] = []

    def answer(arguments: argparse.Namespace, observer: object) -> CommandResult:
        seen.append(arguments)
        return CommandResult(None, lambda: None)  # type: ignore[arg-type, return-value]

    monkeypatch.setattr(import_command_module(name), "answer", answer)
    make_command_call(name)(*words, **given)
    return vars(seen[0])


@for_each(
    ("name", "words", "given", "line"),
    [
        ("compare", ("a", "b"), {"store": Path("/s")}, "a b --store /s"),
        ("gate", ("a", "b"), {"rerun": False}, "a b --no-rerun"),
        ("gate", (), {"history": True, "thresholds": "t.yaml", "duel": None}, "--history --thresholds t.yaml"),
        ("gate", (), {"duel": "last", "imports": []}, "--duel last"),
        (
            "duel",
            ("gemm",),
            {"dtypes": ["fp8", "bf16"], "set": {"shape": [64, "8x8x8"], "operands": "cast"}, "against": "main"},
            "suite gemm --dtypes fp8,bf16 --set shape=64,8x8x8 --set operands=cast --against main",
        ),
        ("duel", (), {"suite": "gemm", "quick": True, "budget": 2.5}, "suite gemm --quick --budget 2.5"),
        ("advise", ("last",), {"training": "last", "least": 5}, "last --training last --least 5"),
        ("sensitivity", (), {"by": "kind", "isolation": False}, "--by kind --no-isolation"),
        ("sensitivity", ("m.py:make",), {"tolerance": 0.5, "quick": None}, None),
        (
            "audit",
            ("m:f",),
            {"kind": "linear", "precision": "fp8", "causal": False},
            "m:f --kind linear --precision fp8",
        ),
    ],
)
def test_a_call_is_the_command_line(
    name: str, words: tuple[Any, ...], given: dict[str, Any], line: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    if line is None:
        with pytest.raises(UnknownName, match="unknown argument of sensitivity 'quick'"):
            asked(name, monkeypatch, *words, **given)
        return
    known = vars(parse_command_words(build_parser([name]), [name, *line.split()]))
    assert asked(name, monkeypatch, *words, **given) == known


def test_a_function_is_named_by_where_another_process_finds_it(monkeypatch: pytest.MonkeyPatch) -> None:
    assert asked("audit", monkeypatch, inspect.signature, kind="linear", precision="fp8")["target"].endswith(
        "inspect.py:signature"
    )
    with pytest.raises(UsageError, match="cannot be found by another process: define it"):
        asked("audit", monkeypatch, lambda x: x)


@for_each("name", CALLS)
def test_a_call_has_every_option_that_does_not_say_how_to_print(name: str) -> None:
    call = getattr(fp8bench, name)
    parser = subparsers_by_name(build_parser([name]))[name]
    printed = ("help", "help_all", "json", "csv", "md", "all", "explain")
    actions = {python_keyword(action): action for action in parser._actions if action.dest not in printed}
    places = {word for word, known in actions.items() if not known.option_strings and known.choices}
    parameters = inspect.signature(call).parameters
    assert set(parameters) == {*actions} - places | {"progress"}
    for word, action in actions.items():
        if action.option_strings:
            assert str(parameters[word].default) == str(action.default or parameters[word].default), word
    assert call.__name__ == name


def arguments_of(call: Any) -> dict[str, str]:
    """A call's arguments and their one-line help."""
    lines = (line.partition(": ") for line in (inspect.getdoc(call) or "").splitlines())
    told = {name: words for name, _, words in lines}
    return {name: told.get(name, "") for name in inspect.signature(call).parameters}


PUBLIC = [name for name in fp8bench.__all__ if inspect.isroutine(getattr(fp8bench, name))]


@for_each("name", [*PUBLIC, "HighAccumulation"])
def test_help_explains_every_argument_in_a_line(name: str) -> None:
    told = arguments_of(getattr(fp8bench, name))
    assert len(told) >= 1 and [argument for argument, words in told.items() if len(words) < 8] == []


def test_arguments_are_explained_by_the_command_line(monkeypatch: pytest.MonkeyPatch) -> None:
    actions = subparsers_by_name(build_parser(["suite"]))["suite"]._actions
    words = {python_keyword(action): (action.help or "").replace("%%", "%") for action in actions}
    told = arguments_of(fp8bench.suite)
    assert {name for name in told if told[name].removeprefix("False: ") == words.get(name)} >= told.keys() - {
        "progress",
        "observer",
    }
    assert told["isolation"].startswith("False: measure in this process")
    assert told["log"] in inspect.getdoc(fp8bench.profile)  # type: ignore[operator]

    def call(store: str, nothing: int) -> None:
        """Does something."""

    explain_arguments("suite", call)
    assert arguments_of(call) == {"store": words["store"], "nothing": ""}


def test_help_of_a_run_says_what_its_frames_hold() -> None:
    text = " ".join((inspect.getdoc(fp8bench.suite) or "").split())
    assert "`run.verdicts` is a pandas frame with a row for each case" in text and "`run.results`" in text


@for_each(
    ("name", "given", "sentence"),
    [
        ("gate", {"treshold": 3}, r"unknown argument of gate 'treshold'\. Did you mean 'thresholds'\?"),
        ("gate", {"rerun": "no"}, "rerun must be True or False, got 'no'"),
        ("gate", {}, "nothing was given to judge"),
        ("compare", {"before": "a"}, r"arguments are required: B \(B: .*\)\. See `fp8bench compare --help`"),
        ("sensitivity", {"steps": "many"}, "argument --steps: expected a whole number from 1 to 100000, got 'many'"),
        ("sensitivity", {"steps": object()}, "steps cannot be <object"),
        ("sensitivity", {"by": "layers"}, "argument --by: invalid choice: 'layers'"),
        ("duel", {"suite": "gem", "quick": True}, r"unknown suite 'gem'\. Did you mean 'gemm'\?"),
    ],
)
def test_what_cannot_be_is_refused_in_the_words_of_the_command_line(
    name: str, given: dict[str, Any], sentence: str, tmp_path: Path
) -> None:
    with pytest.raises(UsageError, match=sentence):
        getattr(fp8bench, name)(**{"store": tmp_path, **given})


def test_a_place_too_many_is_told() -> None:
    with pytest.raises(TypeError, match="too many positional arguments"):
        fp8bench.compare("a", "b", "c")  # type: ignore[call-arg]


def test_an_unknown_name_of_the_package_has_the_nearest_one() -> None:
    with pytest.raises(AttributeError, match=r"no attribute 'gat'\. Did you mean 'gate'\?"):
        fp8bench.gat  # type: ignore[attr-defined]  # noqa: B018


@pytest.mark.slow
def test_a_result_says_what_the_command_prints(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], command_line: Say
) -> None:
    runs = [
        fp8bench.suite("gemm", dtypes=["fp32", "bf16"], set={"shape": 16}, quick=True, isolation=False, store=tmp_path)
        for _ in range(2)
    ]
    assert "report:" in capsys.readouterr().err, "a script sees what follows a run"
    for run in runs:
        assert "slower" in str(run) or "faster" in str(run) or "cannot tell" in str(run) or "same" in str(run)
        assert fp8bench.table(run).startswith(str(run)[:200])
        assert find_report_page(run) in "".join(str(run).split())
        assert re.search(r'<a href="file:[^"]*/report.html">', run._repr_html_())
    sides = [run.id for run in runs]
    monkeypatch.setenv("COLUMNS", "100")
    for name, more in (("compare", {}), ("gate", {"rerun": False})):
        result = getattr(fp8bench, name)(*sides, store=tmp_path, progress=False, **more)
        assert capsys.readouterr() == ("", "")
        words = [name, *sides, "--store", str(tmp_path), *(["--no-rerun"] if more else [])]
        code, printed, _ = command_line(*words)
        assert code == result.code
        shown = printed.split("--explain")[0].rstrip()
        assert str(result).startswith(shown[:200]) and result.page().title in repr(result)
        assert "<table>" in result._repr_html_() or "<p>" in result._repr_html_()
        assert fp8bench.table(result).startswith(shown[:200]) and result.value
    compared = fp8bench.compare(*sides, store=tmp_path)
    assert list(compared.results.columns) == list(compared.as_rows()[0]) and len(compared.results)


def test_files_that_a_call_names_are_written(tmp_path: Path) -> None:
    run, other = (
        fp8bench.suite(
            "gemm", dtypes=["fp32"], set={"shape": 8}, rounds=1, isolation=False, store=tmp_path, report=False
        )
        for _ in range(2)
    )
    assert not (tmp_path / "reports").exists()
    junit = tmp_path / "gate.xml"
    fp8bench.gate(run.id, other.id, store=tmp_path, rerun=False, junit=junit, progress=False)
    assert junit.read_text().startswith("<?xml")
    with pytest.raises(UsageError, match=r"--junit .* cannot be written"):
        fp8bench.gate("a", "b", store=tmp_path, junit=tmp_path / "no" / "x.xml")


def test_what_a_file_names_is_no_markup() -> None:
    run = api.Run(**{**vars(fp8bench.load(measured()[0])), "id": "<b>"})
    assert "<b>" not in run._repr_html_() and "&lt;b&gt;" in run._repr_html_()
