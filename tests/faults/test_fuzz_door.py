"""Thousands of command lines nobody would type: each ends with a sentence and a code, none with a traceback."""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import pytest

import fp8bench.files
from fp8bench import pipeline
from fp8bench.cli import main as cli
from fp8bench.cli.commands import suite
from fp8bench.errors import EXIT_FAILED, EXIT_OK, EXIT_USAGE
from fp8bench.features.selftest import checks, power
from fp8bench.features.sensitivity import job as sensitivity
from fp8bench.features.train import run as training
from fp8bench.jobs import doctor
from fp8bench.model import Case, DeviceFacts, Overheads, Run, Scalar
from fp8bench.plan import corpus
from fp8bench.registry import precisions, workloads
from fp8bench.store.runs.run_file import RunWriter
from tests.counts import counts
from tests.facts import H200
from tests.fakes import CPU, FakeWorker
from tests.trainings import FakeLab

NONSENSE = (
    "",
    " ",
    "-",
    "--",
    "-1",
    "0",
    "1",
    "3",
    "1e3",
    "nan",
    "inf",
    "1e400",
    "9" * 5000,
    "٣",
    "²",
    "x",
    "=",
    "a=",
    "=b",
    "a=b",
    ",",
    ",,",
    "a,",
    "é",
    "🙂",
    "\udcff",
    "\n",
    "\t",
    "a\nb",
    "a\0b",
    "%s",
    "{}",
    "../..",
    "/",
    ".",
    "~",
    "*",
    "--no-such",
    "--dtypes",
    "-h2",
    "x" * 10_000,
    "None",
    "True",
    "[1]",
    "{a: b}",
    "$HOME",
    "last",
)
AXES = ("shape", "size", "sequence", "batch", "tokens", "product", "micro_batches", "no_such_axis", "")
KINDS = ("attn", "mlp", "head", "norm", "blocks.0", "blocks.1.mlp.up", "blocks.7.attn", "blocks.")
MODES = ("fp8-delayed:history=16", "custom:format=e3m2:scaling=row", "fp8:histroy=2", "nvfp4:")
SMALL = ("64", "nano", "1x2x3", "auto", "forward", "8", "llama3-8b", "0", "-5", "99999999999")


class Probed(FakeWorker):
    """Answers what is asked before anything is measured."""

    def __init__(self, *_: object) -> None:
        super().__init__({})

    def _probe(self) -> tuple[DeviceFacts, ...]:
        return (CPU, H200)

    def _software(self) -> dict[str, Scalar | None]:
        return {"torch": "2.13.0+cpu", "torch_threads": 1}

    def _backend(self, name: str) -> str:
        return ""

    def _losses(self, case: Case, facts: DeviceFacts, steps: int, draw: int) -> tuple[float, ...]:
        return (3.0 + 0.01 * draw,) * steps

    def _gradient_error(self, case: Case, reference: Case, facts: DeviceFacts) -> float:
        return 0.1

    def _overheads(self, facts: DeviceFacts) -> Overheads:
        return Overheads(1e-7, 1e-7, 1e-7)


def measure_nothing(run: Run, groups: object, store: Path, writer: RunWriter, *_: object) -> Run:
    writer.finish("finished")
    return replace(run, finished=True)


@pytest.fixture
def files(tmp_path: Path) -> dict[str, str]:
    made = {
        "empty": b"",
        "binary": bytes(range(256)) * 300,
        "short": b"words\n",
        "text": b"some words\n" * 9000,
        "config.yaml": b"suite: gemm\ndtypes: [fp32]\n",
        "broken.yaml": b"a: [1\nb: }",
        "wrong.yaml": b"rounds: many\n",
        "raises.py": b"raise RuntimeError('no')\n",
        "syntax.py": b"def (:\n",
        "nothing.py": b"x = 1\n",
    }
    for name, content in made.items():
        (tmp_path / name).write_bytes(content)
    return {name: str(tmp_path / name) for name in made} | {"folder": str(tmp_path)}


def option(chance: random.Random, files: dict[str, str]) -> list[str]:
    """One option with a value that is mostly right."""

    def one(*values: str) -> str:
        return chance.choice(NONSENSE) if chance.random() < 0.1 else chance.choice(values)

    makers: Sequence[Callable[[], list[str]]] = (
        lambda: ["--dtypes", ",".join(one(*precisions.names()) for _ in range(chance.randint(1, 3)))],
        lambda: ["--devices", one("cpu", "cuda", "cuda:0", "cuda:7", "cpu:1", "rocm")],
        lambda: ["--reference", one(*precisions.names())],
        lambda: ["--set", f"{one(*AXES)}={one(*SMALL)},{one(*SMALL)}"],
        lambda: ["--set", one("shape", "shape=64", "=")],
        lambda: ["--precision-map", f"{one(*KINDS)}={one(*precisions.names(), *MODES)}"],
        lambda: ["--static-scales", one("1", "8", "0")],
        lambda: ["--refresh-scales", one("1", "100", "0")],
        lambda: ["--saturation-bound", one("0", "0.1", "100")],
        lambda: ["--size", one("nano", "gpt2-124m", "huge")],
        lambda: ["--dtype", one(*precisions.names(), *MODES)],
        lambda: ["--by", one("layer", "kind", "head")],
        lambda: ["--steps", one("1", "7", "0")],
        lambda: ["--seeds", one("1", "2", "0")],
        lambda: ["--model", one("nano", "micro", "huge")],
        lambda: ["--arch", one("gpt", "cnn", "rnn")],
        lambda: ["--sweep", one("history=1,16", "rate=0.1", "loss-scale=dynamic,0", "model=nano")],
        lambda: ["--loss-scale", one("auto", "1024", "0.5")],
        lambda: ["--tolerance", one("0", "0.5", "100")],
        lambda: ["--device", one("cpu", "cuda", "cuda:7", "rocm")],
        lambda: ["--data", one(*files.values())],
        lambda: ["--import", one(*files.values(), "no_such_module", "json")],
        lambda: ["--quick"],
        lambda: ["--budget", one("1", "0.5", "0", "-1")],
        lambda: ["--rounds", one("1", "10", "0")],
        lambda: ["--seed", one("0", "7", "-1")],
        lambda: ["--threads", one("1", "2", "0")],
        lambda: ["--case-timeout", one("1", "0")],
        lambda: ["--no-isolation"],
        lambda: ["--dry-run"],
        lambda: ["--store", one(files["folder"] + "/store", *files.values())],
        lambda: ["--resume", one("last", *files.values())],
        lambda: ["--json"],
        lambda: ["--csv", one("-", files["folder"] + "/rows.csv", *files.values())],
        lambda: ["--config", one(*files.values())],
        lambda: [chance.choice(NONSENSE)],
    )
    return chance.choice(makers)()


def command(chance: random.Random, files: dict[str, str]) -> list[str]:
    names = ["suite", "sensitivity", "train", "list", "show", "selftest", "doctor", ""]
    name = chance.choices(names, [14, 3, 3, 2, 3, 1, 1, 1])[0]
    words = [name] if name else []
    if name == "suite" and chance.random() < 0.9:
        strange = ("_planted", *files.values(), *NONSENSE)
        words.append(chance.choice([*workloads.names(), "all", "gemm,cast", chance.choice(strange)]))
    elif name in ("list", "show") and chance.random() < 0.8:
        words.append(chance.choice(["suites", "dtypes", "gemm", "last", *files.values(), *NONSENSE]))
    elif name == "train":
        words.append("--quick")
    for _ in range(chance.choice((0, 1, 1, 2, 3, 5))):
        words += option(chance, files)
    if chance.random() < 0.05:
        chance.shuffle(words)
    return words


@pytest.mark.slow
@counts(200, 2000)
def test_no_command_line_ends_in_a_traceback(
    count: int,
    tmp_path: Path,
    files: dict[str, str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Plans are made, files are read and written as ever; only workers and measuring are left out."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(suite, "workers_ahead", lambda *_: nullcontext(()))
    monkeypatch.setattr(pipeline, "workers_ahead", lambda *_: nullcontext(()))
    monkeypatch.setattr(pipeline, "worker_for", Probed)
    monkeypatch.setattr(pipeline, "_measure", measure_nothing)
    monkeypatch.setattr(corpus, "standard_library_text", lambda: b"text " * 20_000)
    monkeypatch.setattr(doctor, "ProcessWorker", Probed)
    monkeypatch.setattr(sensitivity, "worker_for", Probed)
    monkeypatch.setattr(training, "ProcessWorker", lambda settings, module: FakeLab())
    monkeypatch.setattr(training, "LocalWorker", lambda settings, lab: FakeLab())
    monkeypatch.setattr(fp8bench.files.os, "fsync", lambda descriptor: None)
    monkeypatch.setattr(checks, "checks", lambda device: iter(()))
    monkeypatch.setattr(power, "run_power", lambda *_: power.Power((), (1.0,)))
    chance = random.Random(20261121)
    codes: dict[object, int] = {}
    for number in range(count):
        if number % 50 == 0:  # every run reads those that its store has already
            for store in (".fp8bench", "store"):
                shutil.rmtree(store, ignore_errors=True)
        words = command(chance, files)
        if "--calibrate" in words:
            continue
        try:
            code: object = cli.main(words)
        except SystemExit as end:
            code = f"exit {end.code}"  # argparse ends --help and --version itself
        except Exception as error:
            raise AssertionError(f"{type(error).__name__} from {words!r:.2000}") from error
        codes[code] = codes.get(code, 0) + 1
        shown = capsys.readouterr()
        assert code in (EXIT_OK, EXIT_USAGE, EXIT_FAILED, "exit 0"), words
        assert "Traceback" not in shown.err + shown.out, words
        if code == EXIT_USAGE:
            assert shown.err.startswith("fp8bench:") and len(shown.err) < 30_000, (words, shown.err)
    assert codes[EXIT_USAGE] > count / 4 and codes[EXIT_OK] + codes[EXIT_FAILED] > count / 8, codes
