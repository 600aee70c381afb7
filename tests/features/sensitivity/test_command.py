"""`fp8bench sensitivity` from words to tables, with a real worker."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from fp8bench import pipeline
from fp8bench.measure.handle import LocalWorker
from fp8bench.worker.bench import Bench
from tests.commands import Say, complaints, only_sentence, unfolding
from tests.counts import for_each

NET = """
import torch
from torch import nn


def make():
    model = nn.Sequential(nn.Linear(32, 64), nn.Sequential(nn.ReLU(), nn.Linear(64, 32)), nn.Linear(32, 8))
    return model, torch.randn(16, 32)
"""
FEW = ("--by", "kind", "--steps", "1", "--tolerance", "50")


@pytest.fixture
def say(store: Path, fp8bench: Say, monkeypatch: pytest.MonkeyPatch) -> Say:
    """Runs `sensitivity` in this process, next to a user's model."""
    Path("net.py").write_text(NET)
    monkeypatch.setattr(pipeline, "ProcessWorker", LocalWorker)
    return unfolding(fp8bench, "sensitivity")


@for_each(
    ("words", "message"),
    [
        ("--size huge", "expected one of nano"),
        ("--dtype fb8", "Did you mean 'fp8'"),
        ("--dtype fp8:histroy=2", "unknown option of dtype fp8 'histroy'"),
        ("--device cpi", "Did you mean 'cpu'"),
        ("--reference fp8", "are both fp8"),
        ("--dtype fp32 --reference fp8", "exchange them"),
        ("--reference tf32", "TF32 is one switch"),
        ("--steps 0", "--steps: expected a whole number from 1"),
        ("--tolerance=-1", "a percentage from 0"),
        ("--by head", "invalid choice: 'head'"),
        ("--json --csv -", "would both print"),
        ("--data nowhere.txt", "--data nowhere.txt cannot be read"),
        ("net.py:make --size nano", "--size goes with the transformer"),
        ("net.py:make --data text.txt", "--data goes with"),
        ("nowhere.py:make", "nowhere.py"),
        ("--write-map nowhere/map", "cannot be written"),
    ],
)
def test_bad_arguments_give_one_message(words: str, message: str, say: Say) -> None:
    code, out, err = say(*words.split())
    assert (code, out) == (2, "") and message in only_sentence(err)


def test_layers_of_a_model_of_one_s_own(store: Path, say: Say) -> None:
    code, out, err = say("net.py:make", "--steps", "1", "--dtype", "mxfp4", "--json")
    assert (code, complaints(err)) == (0, "")
    document = json.loads(out)
    probes = {trial["name"]: trial for trial in document["probes"]}
    assert set(probes) == {"0", "1.1", "2"} and document["reference"] == "untouched"
    assert {trial["precision"] for trial in probes.values()} == {"mxfp4"}
    assert probes["1.1"]["precision_map"] == [["0", "untouched"], ["2", "untouched"]]
    errors = {name: trial["gradient_error"] for name, trial in probes.items()}
    error_of_all = document["candidates"][0]["gradient_error"]
    assert all(0 < error < error_of_all for error in errors.values())
    assert len({trial["loss"] for trial in (document["baseline"], *document["draws"])}) == 3
    assert json.loads(next((store / "sensitivity").iterdir()).read_text())["params"][0] == ["make", "net.py:make"]
    code, _, err = say("net.py:make", "--steps", "1", "--by", "kind", "--write-map", "map.txt")
    assert code == 2 and "no map is suggested" in err and not Path("map.txt").exists()


def test_a_map_by_the_gradients_of_a_model_of_one_s_own(store: Path, say: Say) -> None:
    words = ("net.py:make", "--steps", "1", "--dtype", "mxfp4", "--tolerance", "50", "--json")
    unlimited = json.loads(say(*words)[1])
    errors = sorted(trial["gradient_error"] for trial in unlimited["probes"])
    most = 100 * (errors[0] + errors[1]) / 2
    code, out, _ = say(*words, "--gradient-tolerance", f"{most:.4f}", "--write-map", "map.txt")
    document = json.loads(out)
    assert code == 0 and len(document["candidates"]) == 3 and len(document["candidates"][-1]["low"]) == 1
    assert all(100 * trial["gradient_error"] > most for trial in document["candidates"][:-1])
    assert document["suggested"] and Path("map.txt").read_text().count("=untouched") == 2


def test_a_reference_that_fails_ends_it(say: Say, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(self: object, *arguments: object) -> tuple[float, ...]:
        raise RuntimeError("no such kernel")

    monkeypatch.setattr("fp8bench.workloads.transformer.Transformer.losses", broken)
    code, out, _ = say(*FEW)
    assert code == 3 and "the reference itself failed: RuntimeError: no such kernel" in out


def test_an_interrupt_prints_the_finished_part(say: Say, monkeypatch: pytest.MonkeyPatch) -> None:
    inner, calls = Bench.losses, []

    def interrupted(self: Bench, *arguments: object) -> tuple[float, ...]:
        calls.append(arguments)
        if len(calls) == 5:
            raise KeyboardInterrupt
        return inner(self, *arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(Bench, "losses", interrupted)
    code, out, err = say("net.py:make", "--steps", "1")
    assert code == 130 and "interrupted; what was trained is shown" in err
    assert "low layer" in out and "suggested" not in out and "stored in" in out


def test_a_store_that_takes_nothing_costs_nobody_the_table(store: Path, say: Say) -> None:
    store.mkdir()
    (store / "sensitivity").write_text("no folder")
    code, out, err = say("net.py:make", "--steps", "1")
    assert code == 2 and "suggested" in out and "the study .fp8bench/sensitivity/" in err and "cannot be written" in err


@pytest.mark.slow
def test_a_study_runs_in_a_process_of_its_own_and_imports_no_torch(store: Path) -> None:
    code = (
        "import sys\nfrom fp8bench.cli.main import main\n"
        f"code = main({['sensitivity', *FEW, '--csv', '-']!r})\n"
        "print('torch' in sys.modules, file=sys.stderr)\nsys.exit(code)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "False\n")
    assert len(done.stdout.splitlines()) == 8
