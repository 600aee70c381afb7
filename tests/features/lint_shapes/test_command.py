"""lint-shapes' text, rows and exit codes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from fp8bench import pipeline
from fp8bench.measure.handle import LocalWorker
from tests.commands import Say, unfolding
from tests.counts import for_each


@pytest.fixture
def say(store: Path, fp8bench: Say) -> Say:
    return unfolding(fp8bench, "lint-shapes")


@for_each(
    ("words", "code", "said"),
    [
        ("--model llama3-8b --devices h100,a100 --dtypes fp8", 0, "h100 all a100 - why there is no such product"),
        ("--model nano --devices cpu", 3, "no CPU has units for it: emulated, in any shape"),
        ("--model gpt2 --devices l40s --dtypes fp8", 3, "head forward 8192 x 50257 x 768 8192 x 50272 x 768"),
        ("--shapes FILE --devices h100 --products forward --dtypes fp8,fp8-e5m2", 3,
         "two E5M2 operands are not multiplied on NVIDIA's GPUs (torch): straight forward"),
        ("--shapes FILE --devices h100 --products forward --dtypes fp8,fp8-e5m2", 3,
         "its contraction must be innermost (torch): turned forward, fp8 on h100"),
    ],
)  # fmt: skip
def test_what_fits_and_what_does_not_is_told(say: Say, tmp_path: Path, words: str, code: int, said: str) -> None:
    file = tmp_path / "shapes.csv"
    file.write_text("m,n,k,name,layout\n64,64,64,straight,\n64,64,64,turned,row\n")
    ended, out, _ = say(*words.replace("FILE", str(file)).split())
    assert ended == code and said in " ".join(out.split()), out


def test_a_layer_that_is_called_with_several_rows(say: Say, tmp_path: Path) -> None:
    """It is one layer, and where some of its products fit the refusal is not of every product."""
    file = tmp_path / "shapes.txt"
    file.write_text("16x64x64 same\n8x64x64 same\n")
    words = f"--shapes {file} --devices h100 --products weight-gradient --dtypes fp8"
    _, out, _ = say(*words.split())
    told = " ".join(out.split())
    assert "2 products of 1 layer" in told and "1 of 2" in told and "in fp8: same weight-gradient." in told


@for_each(
    ("words", "said"),
    [
        ("", "neither --model nor --shapes"),
        ("gpt2 --shapes a.txt", "both --model and --shapes"),
        ("gpt3", "Did you mean 'gpt2'"),
        ("net.py", "names no function"),
        ("net.py:make --tokens 4", "--tokens goes with known models"),
        ("--shapes absent.txt", "cannot be read"),
        ("--shapes absent.txt --tokens 4", "--tokens goes with --model"),
        ("gpt2 --tokens 0", "expected a whole number from 1"),
        ("gpt2 --products backward", "unknown product 'backward'"),
        ("gpt2 --dtypes fp9", "unknown dtype 'fp9'"),
        ("gpt2 --dtypes fp8:history=3", "unknown option of dtype fp8"),
        ("gpt2 --dtypes fp32", "fp32 scales nothing"),
        ("gpt2 --devices h1000", "Did you mean 'h100'"),
        ("gpt2 --json --csv -", "both print on stdout"),
        ("gpt2 --csv nowhere/rows.csv", "there is no directory nowhere"),
        ("gpt2 --dtypes fp8:weight-gradient=bf16 --products weight-gradient", "stay in bf16"),
    ],
)
def test_bad_usage_is_one_sentence(say: Say, words: str, said: str) -> None:
    code, out, err = say(*words.split())
    assert (code, out) == (2, "") and said in err and err.count("\n") == 1


NET = """
import torch
from torch import nn

def make():
    body = nn.Sequential(nn.Linear(32, 50), nn.ReLU(), nn.Linear(50, 32), nn.Unflatten(0, (1, 16)))
    return nn.Sequential(body, nn.Conv1d(16, 8, 1), nn.Linear(32, 16)), torch.randn(16, 32)

def images():
    return nn.Conv2d(3, 4, 3), torch.randn(2, 3, 8, 8)
"""


def test_layers_of_a_model_of_ones_own(say: Say, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each linear layer that a step calls, with the rows of its batch; a convolution is no scaled product."""
    Path("net.py").write_text(NET)
    monkeypatch.setattr(pipeline, "ProcessWorker", LocalWorker)
    code, out, _ = say("net.py:make", "--devices", "h100", "--dtypes", "fp8", "--json")
    shapes = {(row["layer"], row["m"], row["n"], row["k"]) for row in json.loads(out)["findings"]
              if row["product"] == "forward"}  # fmt: skip
    assert code == 3 and shapes == {("0.0", 16, 50, 32), ("0.2", 16, 32, 50), ("2", 8, 16, 32)}
    code, _, err = say("net.py:images")
    assert code == 2 and "calls no linear layer" in err


def test_no_torch_is_needed() -> None:
    """The rules are values: a machine with neither GPU nor torch can be asked."""
    script = (
        "import sys; sys.modules['torch'] = None; from fp8bench.cli.main import main; "
        "sys.exit(main(['lint-shapes', '--model', 'llama3-8b', '--dtypes', 'fp8,nvfp4']))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
