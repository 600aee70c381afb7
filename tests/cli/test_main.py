"""The door: its options, its exit codes, its refusals, and one suite from words to table."""

from __future__ import annotations

import argparse
import contextlib
import io
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fp8bench import pipeline
from fp8bench.cli.main import build_parser, import_user_code, main, subparsers_by_name
from fp8bench.errors import WorkerLost
from fp8bench.features.selftest import checks, power
from fp8bench.jobs import doctor, several_runs
from fp8bench.measure.handle import LocalWorker
from fp8bench.model import Environment, Label, Plan, Request, Run, Status
from fp8bench.plan.make import check_request, make_plan
from fp8bench.protocols import Observer
from fp8bench.store.runs.listing import run_files
from fp8bench.store.runs.run_file import load_run, start_run
from tests.commands import PROGRAM, Say, environment, only_sentence, unfolded, unfolding
from tests.counts import for_each
from tests.facts import CPU

QUICK = ("--set", "shape=64", "--quick")
DRY = ("suite", "gemm", "--dry-run", "--no-isolation")


@for_each("words", [[], ["--help"], ["suite", "--help"], ["--version"], ["list"], ["history"]])
def test_what_only_informs_ends_well(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    try:
        code = main(words)
    except SystemExit as ended:  # argparse exits here after --help
        code = int(ended.code or 0)
    shown = capsys.readouterr()
    assert code == 0 and shown.out and not shown.err


# Command-line words and the expected message.
REFUSED = """
siute | Did you mean 'suite'
suite gemm --dtype fp8 | Did you mean '--dtypes'
history shwo | unknown command 'shwo'. Did you mean 'show'? Known: ack, list
--store x show last | Options follow the command. See `fp8be
history --store x list | unknown command 'x'. Known: ack, list, merge
history list --grid | unknown argument '--grid'.
history list --run | Did you mean '--runs'?
history show a b | unknown argument 'b'. Known: those of `fp8bench history show --help`.
suite | no suite was named. Give one of
suite gem | Did you mean 'gemm'
suite _planted | unknown suite '_planted'
suite mine | transformer, vision; or a .py file with your suites.
suite gemm,_planted | unknown suite '_planted'
list _planted | unknown thing to list '_planted'
suite gemm, | the suite 'gemm,' has an empty name
suite ./file | the suite './file' is a path
suite gemm --dtypes fp8,bf61 | unknown precision 'bf61'. Did you mean 'bf16'
suite gemm --reference fp23 | Did you mean 'fp32'
suite gemm --devices cpx | Did you mean 'cpu'
suite gemm --devices cuda:77 | unknown device on this machine 'cuda:77'
report last --md - | --md '-' would be a file of that name
suite gemm --dtypes fp8,bf16,fp8 | --dtypes names fp8 twice
suite gemm --devices cpu,cpu | --devices names cpu twice. Leave one out.
suite gemm --set shape=64 --set shape=32,64 | --set shape names 64 twice. Leave one out.
suite gemm,collective | suite collective needs 2 processes. Add --ranks 2
suite colective | Did you mean 'collective'
audit | required: MODULE:FUNCTION (MODULE:FUNCTION: the function to audit, also as file.py:function). See
ablate | as in profile; --options: precisions, compile
duel | followed by its name; NAME: a suite, several with commas
train nano | Give --model nano.
profile nothere.py | 'nothere.py' is not a function. Give module:function
suite gemm --set shap=64 | Did you mean 'shape'
suite gemm --set shape=big | axis 'shape' cannot be 'big'
suite gemm --set shape=0 | expected sizes from 1
suite gemm --set product=backward | expected one of auto, forward
suite transformer --set batch=two | expected a whole number
suite gemm --set shape | 'shape' is not of the form AXIS=VALUE,VALUE
suite gemm --set =64 | is not of the form AXIS=VALUE,VALUE
suite gemm --set shape= | empty name
suite gemm --set shape=1,,2 | empty name
suite gemm --dtypes '' | empty name
suite gemm --dtypes fp8, | empty name
suite transformer --precision-map atn=fp8 | unknown layer of suite transformer 'atn'. Did you
suite transformer --precision-map blocks.0.mpl=fp8 | Did you mean 'blocks.0.mlp'? Known: attn, mlp, head,
suite transformer --precision-map =fp8 | is not of the form LAYER=DTYPE
suite transformer --precision-map mlp= | is not of the form LAYER=DTYPE
suite transformer --precision-map mlp=fp8:histroy=3 | unknown option of dtype fp8 'histroy'
suite gemm --precision-map mlp=fp8 | Known: none
suite transformer --precision-map mlp | is not of the form LAYER=DTYPE,LAYER=DTYPE
suite transformer --precision-map '' | is not of the form LAYER=DTYPE,LAYER=DTYPE
suite transformer --precision-map mlp=b=c | unknown precision 'b=c'
suite transformer --precision-map mlp=fp8,mlp=bf16 | twice
suite transformer --precision-map mlp=pf8 | Did you mean 'fp8'
suite transformer --dtypes bf16 --precision-map mlp=fp8 | would have no effect
suite mlp --static-scales 0 | --static-scales: expected a whole number from 1 to 100000
suite mlp --refresh-scales 9 | renews scales from data, but the request has none
suite mlp --saturation-bound 1 | Add --static-scales N
suite mlp --static-scales 2 --saturation-bound 100 | a percentage from 0 to below 100
suite mlp --saturation-bound nan | a percentage from 0 to below 100
suite mlp --dtypes bf16,mxfp8 --static-scales 2 | --static-scales would have no effect: no layer of
suite gemm --dtypes fp8 --static-scales 2 | Add a precision with such
suite gemm --max-batch 1G | suite gemm has no batch axis. Suites with one: at
suite mlp --max-batch | expected one argument
suite mlp --max-batch lots | size like 2GiB, 512MB or 1.5G
suite mlp --max-batch 0.1 | above 0 and up to 100 TiB, like 2GiB, or device, got '0.1'
suite mlp --devices cpu --max-batch device | Give a size, like --max-batch 2GiB
suite mlp --devices cpu --max-batch 99TiB | --max-batch 99.0 TiB is more than cpu has
suite gemm --rounds 0 | expected a whole number from 1, got '0'
suite gemm --rounds -1 | --rounds
suite gemm --rounds x | expected a whole number from 1, got 'x'
suite gemm --rounds '²' | expected a whole number
suite gemm --budget 0 | expected a number of seconds above 0, got '0'
suite gemm --budget nan | expected a number of seconds above 0
suite gemm --budget inf | expected a number of seconds above 0
suite gemm --budget=-1 | expected a number of seconds above 0
suite gemm --budget x | expected a number of seconds above 0
suite gemm --seed=-1 | expected a whole number from 0
suite gemm --threads 0 | expected a whole number from 1
suite gemm --threads 1000000 | expected a whole number from 1 to 1024, got
suite gemm --store '' | an empty text is not a path
show last --store '' | an empty text is not a path
suite gemm --no-isolation --case-timeout 5 | --case-timeout is impossible with --no-isolation
suite transformer --data nowhere.txt | --data nowhere.txt cannot be read
suite gemm --store file/store | store file/store cannot be written
suite gemm --store file | cannot be written
suite transformer --store file | Choose another --store DIR
suite gemm --import failing.py | importing 'failing.py' failed: ValueError: no (failing.py, line 1). Give
suite gemm --import no_such_module | ModuleNotFoundError
suite gemm --import nowhere.py | no such file
list precision | Did you mean 'precisions'
list --import failing.py | failed: ValueError
show abc | no run 'abc' in .fp8bench
show | RUN
show file | is not a run file
show deep.json | is not a run file
selftest --trials 3 | --trials needs --power
selftest --power --operation smal | Did you mean 'small'
selftest --power --device cuda:7 | unknown device on this machine
selftest --json x | --json needs --power
"""
EACH = " ".join(map(str, range(1, 151))).replace(" ", ",")
LONG = [
    (["suite", "gemm", f"--set=shape={EACH}", f"--set=tokens={EACH}"], "22500 combinations; the most is 20000"),
    (["suite", "gemm", "--rounds", "9" * 5000], "expected a whole number"),
    (["show", "a" * 400], "failed (File name too long)"),
]


@for_each(
    ("words", "sentence"),
    [*((shlex.split(typed), said) for typed, said in (line.split(" | ") for line in REFUSED.split("\n")[1:-1])), *LONG],
)
def test_bad_input_is_one_sentence_and_code_2(
    words: list[str], sentence: str, store: Path, fp8bench: Say, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pipeline, "ProcessWorker", LocalWorker)
    Path("file").write_text("something")
    Path("deep.json").write_text("[" * 100_000)
    Path("failing.py").write_text("raise ValueError('no')")
    code, out, err = unfolding(fp8bench)(*words)
    assert (code, out) == (2, "") and sentence in err and "Traceback" not in err and not list(run_files(store))
    told = only_sentence(err)
    assert told.startswith("fp8bench: ") and told.endswith(".")


@for_each("columns", ["40", "80", "160"])
def test_sentences_on_stderr_end_where_the_terminal_does(
    columns: str, store: Path, fp8bench: Say, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Wrapped to COLUMNS or the terminal width; without either, one line."""
    words = ("suite", "gemm", "--set", "shape=0,no-shape", "--dtypes", "bf17")
    monkeypatch.setenv("COLUMNS", columns)
    code, _, folded = fp8bench(*words)
    *sentence, pasted = folded.splitlines()
    assert code == 2 and len(sentence) > 1 and max(map(len, sentence)) <= int(columns)
    assert pasted.startswith("  fp8bench suite")  # meant for copying, so not wrapped
    monkeypatch.delenv("COLUMNS")
    assert fp8bench(*words) == (2, "", unfolded(folded))


def test_labels_and_rules_are_explained(fp8bench: Say) -> None:
    code, out, _ = fp8bench("list", "labels", "cross-run")
    assert code == 0 and out.startswith("cross-run: the two sides") and "Remedy: " in out
    assert {line.split(":")[0] for line in fp8bench("list", "labels")[1].splitlines()} >= set(Label)
    assert "\nloss-back-up: Detects " in fp8bench("list", "rules")[1]
    assert "unknown rule 'lagg'. Did you mean 'lag'?" in fp8bench("list", "rules", "lagg")[2]


def test_a_suite_from_words_to_table(store: Path, fp8bench: Say) -> None:
    """In this process. The report's path is printed with the table, before the file exists."""
    code, table, err = unfolding(fp8bench)("suite", "gemm", *QUICK, "--no-isolation")
    (path,) = run_files(store)
    assert (code, err) == (0, f"fp8bench: report: .fp8bench/reports/{path.stem}/report.html\n")
    run = load_run(path)
    assert run.finished and run.ok and not run.troubles
    assert {record.case.precision: record.status for record in run.records} == dict.fromkeys(
        ("fp32", "bf16", "fp8"), Status.OK
    )
    assert all(record.timing and record.timing.num_rounds >= 4 for record in run.records)
    for word in ("fp32", "bf16", "fp8", "speed unknown", f"show {run.id}"):
        assert word in table
    for name in ("last", run.id, path.stem, str(path)):
        shown = " ".join(fp8bench("show", name)[1].split())
        page = f"Page: .fp8bench/reports/{path.stem}/report.html "
        assert page in shown and shown.replace(page, "") == " ".join(table.split())
    assert "few-samples: fewer than" in fp8bench("show", "last", "--explain")[1]


def test_a_dry_run_prints_the_plan_and_writes_no_run(
    store: Path, fp8bench: Say, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("prepare", "slot", "error"):
        monkeypatch.setattr(f"fp8bench.worker.bench.Bench.{name}", None)
    code, out, err = fp8bench(*DRY, "--set", "shape=64,gpt2")
    assert (code, err) == (0, "") and "64" in out and "gpt2/qkv" in out and not list(run_files(store))


@for_each(
    ("words", "told"),
    [
        ([], ["time: about 6 s to 12 s, or longer if a step takes seconds"]),
        (["--budget", "90"], ["time: about 1 min 30 s, the budget"]),
        (["--rounds", "7"], ["time: 7 rounds of every group"]),
        (["--quick"], ["time: 10 rounds of every group"]),
        (["--set", "shape=32"], ["m=64 ", "m=32 "]),
    ],
)
def test_a_dry_run_says_what_and_how_long(words: list[str], told: list[str], store: Path, fp8bench: Say) -> None:
    out = fp8bench(*DRY, "--set", "shape=64", *words)[1]
    assert all(words_told in out for words_told in told)


FAILING = """
from fp8bench.suites import Axis, Work, Workload, one_of, workloads


@workloads.register("door_failing")
class DoorFailing(Workload):
    name = "door_failing"
    summary = "fails in bf16"

    def axes(self, facts):
        return ()

    def work(self, params):
        return Work(1.0)

    def prepare(self, setup):
        if setup.case.precision == "bf16":
            raise ValueError("planted failure")

    def step(self, state, phase):
        with phase.gemm:
            sum(range(1000))
"""


@pytest.fixture
def failing(store: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    from fp8bench.registry import workloads

    workloads.names()
    monkeypatch.setattr(workloads, "_leaves", dict(workloads._leaves))
    path = Path("door_failing.py")
    path.write_text(FAILING)
    return str(path)


@pytest.mark.parametrize("dtypes", ["fp32,bf16", "bf16"])
def test_a_failed_case_is_code_3_and_a_row(dtypes: str, store: Path, failing: str, fp8bench: Say) -> None:
    words = ("suite", "door_failing", "--import", failing, "--dtypes", dtypes, "--quick", "--no-isolation")
    code, out, err = fp8bench(*words)
    assert code == 3 and "planted failure" in out and dtypes[:4] in out and "Traceback" not in err
    (path,) = run_files(store)
    statuses = {"fp32": Status.OK, "bf16": Status.FAILED}
    assert [record.status for record in load_run(path).records] == [statuses[dtype] for dtype in dtypes.split(",")]


EMPTY = Run(
    "abc", "2026-01-01T00:00:00+00:00", "words", Request("gemm"), Plan(()), Environment({}), (CPU,), path="kept.jsonl"
)


@for_each(
    ("outcome", "code", "sentence"),
    [
        (KeyboardInterrupt(), 130, "interrupted\n"),
        (EMPTY, 130, "interrupted; what was finished is kept in kept.jsonl.\n  To do the rest: fp8bench suite -"),
        (WorkerLost("the worker crashed during 'probe': it exited with status 1"), 3, "the worker crashed"),
        (ModuleNotFoundError("No module named 'yaml'", name="yaml.nodes"), 2, "yaml is not installed for "),
    ],
)
def test_other_ends(
    outcome: Run | BaseException, code: int, sentence: str, store: Path, fp8bench: Say, monkeypatch: pytest.MonkeyPatch
) -> None:

    def execute(*arguments: object, **options: object) -> Run:
        if isinstance(outcome, BaseException):
            raise outcome
        return outcome

    monkeypatch.setattr(pipeline, "execute", execute)
    ended, _, err = unfolding(fp8bench)("suite", "gemm")
    assert ended == code and err.startswith(f"fp8bench: {sentence}")


@pytest.mark.parametrize(
    ("end", "words"),
    [
        ("os._exit(0)", "ending.py, line 10 ended the whole process (os._exit(0))"),
        ("sys.exit(0)", "your code ended the command: SystemExit: 0 (ending.py, line 10)"),
    ],
)
def test_a_suite_that_ends_the_process_is_told(end: str, words: str, tmp_path: Path) -> None:
    """Otherwise only the suite's exit code would remain, which meant success."""
    lines = [
        "import os, sys",
        "from fp8bench.suites import Workload, workloads",
        "@workloads.register('ending')",
        "class Ending(Workload):",
        "    name = 'ending'",
        "    summary = 'ends'",
        "    def axes(self, facts):",
        "        return ()",
        "    def work(self, params):",
        f"        {end}",
        "    def prepare(self, setup):",
        "        return None",
        "    def step(self, state, phase):",
        "        pass",
    ]
    (tmp_path / "ending.py").write_text("\n".join(lines))
    typed = [*PROGRAM, "suite", "./ending.py", "--dry-run"]
    done = subprocess.run(typed, cwd=tmp_path, env=environment(), capture_output=True, text=True, check=False)
    assert done.returncode == 2 and words in unfolded(done.stderr) and "Traceback" not in done.stderr


def test_a_reader_that_leaves_early_is_no_error(tmp_path: Path) -> None:
    run = Run("abc", "2026-01-01T00:00:00+00:00", "w" * 300_000, Request("gemm"), Plan(()), Environment({}), (CPU,))
    start_run(run, tmp_path).finish("finished")
    command = [sys.executable, "-W", "error", "-c", _SHOW_MUCH, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stderr is not None
        process.stdout.close()
        assert process.wait(timeout=240) == 0
        assert process.stderr.read() == ""


_SHOW_MUCH = """
import sys
from fp8bench.cli import main as cli
from fp8bench.cli import outputs
outputs.render = lambda *given, **named: "line\\n" * 100_000
sys.exit(cli.main(["show", "last", "--store", sys.argv[1]]))
"""


def every_option(parser: argparse.ArgumentParser) -> set[str]:
    own = {word for action in parser._actions for word in action.option_strings}
    return own.union(*map(every_option, subparsers_by_name(parser).values()))


WORDS = st.sampled_from([
    "suite", "list", "doctor", "show", "selftest", "gemm", "transformer", "_planted", "suites", "dtypes", "last",
    "fp8", "fp8,bf16", "fp4", "cpu", "cuda", "cuda:0", "shape=64", "shape=1x2x3,gpt2", "size=nano", "batch=2",
    "mlp=fp8", "attn=bf16,mlp=fp4", "0", "1", "3", "-1", "nan", "1e3", "", "=", ",", "--", "-", "-x",
    "no_such_module", "os",
    "--dtypes=fp8", "--set=shape=8", "--budget=5", "--rounds=2", "/dev/null", ".",
    *sorted(every_option(build_parser())),
])  # fmt: skip
# Any argument a shell can pass: no NUL; lone surrogates (bytes that are not UTF-8) included.
RANDOM = st.text(st.characters(exclude_characters="\0"), max_size=6)
STARTS = st.sampled_from([["suite", "gemm"], ["suite", "transformer"], ["suite"], ["list"], ["show"], ["selftest"], []])


def _fake_execute(request: Request, store: Path, observer: Observer, command: str, **options: object) -> Run:
    check_request(request)
    plan = make_plan(request, (CPU,), "text:00000000")
    return Run("abc", "2026-01-01T00:00:00+00:00", command, request, plan, Environment({}), (CPU,), finished=True)


@given(STARTS, st.lists(WORDS | RANDOM, max_size=6))
def test_any_words_end_with_a_known_code_and_no_traceback(start: list[str], rest: list[str]) -> None:
    """Only measuring is replaced; parsing, planning and printing are real."""
    out, err = io.StringIO(), io.StringIO()
    with (
        contextlib.ExitStack() as stack,
        pytest.MonkeyPatch.context() as patch,
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
    ):
        patch.setattr(pipeline, "execute", _fake_execute)
        patch.setattr(pipeline, "plan_only", lambda request, store: (make_plan(request, (CPU,), "text:0"), (CPU,)))
        patch.setattr(doctor, "examine", lambda calibrate: iter(["fine"]))
        patch.setattr(several_runs, "measure_standard_case", lambda store, observer: iter(["alike"]))
        patch.setattr(doctor, "describe_subject", lambda what, imports, name: iter([what]))
        patch.setattr(checks, "run_selfchecks", lambda device: iter(()))
        patch.setattr(power, "measure_power", lambda *_: power.OperationResult("nothing", loads=[1.0]))
        patch.setattr(sys, "path", list(sys.path))
        patch.chdir(stack.enter_context(tempfile.TemporaryDirectory()))  # --csv creates files
        try:
            code = main([*start, *rest])
        except SystemExit as ended:  # argparse exits here after --help and --version
            code = int(ended.code or 0)
    assert code in {0, 2, 3}
    assert "Traceback" not in err.getvalue()
    if code == 2:
        assert err.getvalue().startswith("fp8bench: ") and not out.getvalue()


def test_no_memory_is_a_sentence(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def greedy(_: list[str]) -> int:
        raise MemoryError

    monkeypatch.setattr("fp8bench.cli.main._run_command", greedy)
    assert main(["list"]) == 3
    assert "ran out of memory" in " ".join(capsys.readouterr().err.split())


def test_a_deleted_working_directory_is_a_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    for words in (["suite", "gemm", "--quick"], ["list"], ["show", "last"]):
        assert main(words) == 2
        assert "the working directory has been deleted" in capsys.readouterr().err


def test_modules_of_the_working_directory_are_found_by_any_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "path", [folder for folder in sys.path if folder])
    monkeypatch.chdir(tmp_path)
    import_user_code(argparse.Namespace())
    assert sys.path[0] == str(tmp_path)
