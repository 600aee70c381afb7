"""Beginners' mistakes: each message names the intended word and a command to paste."""

from __future__ import annotations

import shlex
import shutil
from pathlib import Path

import pytest

import fp8bench
from fp8bench import pipeline
from fp8bench.cli.main import build_parser
from fp8bench.errors import UnknownName, UsageError
from fp8bench.measure.handle import LocalWorker
from fp8bench.suggestions import guess_intended_name
from tests.commands import ROOT, Say
from tests.counts import for_each

# Typed words | expected message | command to paste, without its first word; '' if the message contains it.
MISTAKES = """
suit transformer | unknown command 'suit'. Did you mean 'suite'? | suite transformer
benchmark gemm | Did you mean 'suite'? | suite gemm
gemm --dtypes bf16 | 'gemm' is a suite, and the command before it is missing | suite gemm --dtypes bf16
mine.py --quick | the command before it is missing | suite mine.py --quick
diff HEAD~1 HEAD | Did you mean 'compare'? | compare 'HEAD~1' HEAD
check | Did you mean 'doctor'? | doctor
nonsense | Known: ablate, advise, | --help
suite GEMM | Did you mean 'gemm'? | suite gemm
suite bert | Did you mean 'transformer'? | suite transformer
suite matmul --quick | Did you mean 'gemm'? | suite gemm --quick
suite flash-attention | Did you mean 'attention'? | suite attention
suite norm-act | Did you mean 'norm_act'? | suite norm_act
suite nonsense | or a .py file with your suites | list suites
suite '' | the suite '' has an empty name | suite --help
suite folder | the suite 'folder' is a path | suite --help
suite notes.txt | the suite 'notes.txt' is a path. Give a name, or a file that ends in .py | suite --help
suite net | the suite 'net' is a path | suite net.py
suite net.py | net.py registers no suite | suite --help
suite net.py:make | `fp8bench profile net.py:make` and `fp8bench train net.py:make` take models |
suite gemm --dtypes float8 | unknown precision 'float8'. Did you mean 'fp8'? | suite gemm --dtypes fp8
suite gemm --dtypes bf16,torch.float8_e4m3fn | Did you mean 'fp8-e4m3'? | suite gemm --dtypes bf16,fp8-e4m3
suite gemm --dtypes half | Did you mean 'fp16'? | suite gemm --dtypes fp16
suite gemm --dtypes bfloat16 | Did you mean 'bf16'? | suite gemm --dtypes bf16
suite gemm --dtypes FP8 | Did you mean 'fp8'? | suite gemm --dtypes fp8
suite gemm --dtypes e5m2 | Did you mean 'fp8-e5m2'? | suite gemm --dtypes fp8-e5m2
suite gemm --dtypes int8 | Did you mean 'fp8'? | suite gemm --dtypes fp8
suite gemm --dtypes mx | Did you mean 'mxfp8'? | suite gemm --dtypes mxfp8
suite gemm --dtypes fp64 | all errors are already relative to fp64 | suite gemm --dtypes fp32
suite gemm --dtypes nonsense | unknown precision 'nonsense' | list precisions
suite gemm --dtype bf16 | Did you mean '--dtypes'? | suite gemm --dtypes bf16
suite gemm --device gpu | Did you mean '--devices'? | suite gemm --devices gpu
suite gemm --devices gpu | unknown device 'gpu'. Did you mean 'cuda'? | suite gemm --devices cuda
suite gemm --devices cuda:77 | unknown device on this machine 'cuda:77'. Known: cpu | doctor
suite gemm --batch-size 8 | Did you mean '--set batch='? | suite gemm --set batch=8
suite gemm --batch_size=8 --quick | Did you mean '--set batch='? | suite gemm --set batch=8 --quick
suite gemm --iterations 10 | Did you mean '--rounds'? | suite gemm --rounds 10
suite gemm -o out.csv | Did you mean '--csv'? | suite gemm --csv out.csv
suite gemm --format json | Known: those of `fp8bench suite --help` |
suite gemm --import folder | folder is a directory without a module | suite --help
suite gemm --import net.py:make | importing 'net.py:make' failed | suite --help
suite gemm --rounds ten | expected a whole number from 1, got 'ten'. See `fp8bench suite --help` |
train bert | Did you mean --model nano? | train --model nano
train llama --steps 9 | Did you mean --model llama-1b? | train --model llama-1b --steps 9
train --dtypes e4m3 | Did you mean 'fp8-e4m3'? | train --dtypes fp8-e4m3
train --epochs 3 | Did you mean '--steps'? | train --steps 3
train --lr 0.1 | Did you mean '--rate'? | train --rate 0.1
profile net.py | 'net.py' is not a function. Give module:function, or file.py:function. | profile --help
audit '' | '' is not a function | audit --help
audit net.py:make --precision bfloat16 | Did you mean 'bf16'? | audit net.py:make --precision bf16
audit net.py:bfloat16 --precision bfloat16 | Did you mean 'bf16'? | audit net.py:bfloat16 --precision bf16
audit net.py:make --kind gemm | invalid choice: 'gemm' | audit net.py:make --kind product
duel gemm --quick | invalid choice: 'gemm' | duel suite gemm --quick
duel suite gem | Did you mean 'gemm'? | duel suite gemm
compare last | arguments are required: B | compare 'HEAD~1' HEAD
compare notes.txt nope.jsonl | no such file: nope.jsonl | history list --runs
compare HEAD~40000 HEAD | git has no commit 'HEAD~40000' here | history list --runs
compare last last | have the run | compare --help
gate last | 1 side was given. Give two | gate --help
show 12345678 | no run '12345678' in .fp8bench | history list --runs
show latest | Give an id, a run's name, a path, or 'last' | show last
report run.jsonl | no such file: run.jsonl | history list --runs
list workloads | Did you mean 'suites'? | list suites
init --force | Known: those of `fp8bench init --help` |
"""


@for_each(
    ("typed", "said", "pasted"), [line.split(" | ") for line in MISTAKES.replace(" |\n", " | \n").split("\n")[1:-1]]
)
def test_a_mistake_is_answered_by_a_sentence_and_a_line_to_paste(
    typed: str, said: str, pasted: str, store: Path, fp8bench: Say, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pipeline, "ProcessWorker", LocalWorker)
    monkeypatch.delenv("COLUMNS")
    Path("net.py").write_text("class Kernel: ...\ndef make(): ...\n")
    Path("notes.txt").write_text("notes")
    Path("folder").mkdir(exist_ok=True)
    if "last" in typed or "latest" in typed:
        kept = store / "runs" / "box"
        kept.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / "reports" / "sample" / "run.jsonl", kept / "20260105T120000Z-0a1b2c3d-a95c7ff0.jsonl")
    code, out, err = fp8bench(*shlex.split(typed))
    sentence, *line = err.splitlines()
    assert (code, out) == (2, "") and sentence.startswith("fp8bench: ") and said in sentence, err
    assert line == ([f"  fp8bench {pasted}"] if pasted else []), err
    shown = f" {pasted}" if pasted else sentence.partition("`fp8bench")[2].partition("`")[0]
    words = shlex.split(shown)
    if words[-1] != "--help":
        build_parser(words[:1]).parse_args(words)


@for_each(
    ("name", "given", "meant"),
    [
        ("suite", {"suite": "transformer", "dtype": "fp8"}, "dtypes"),
        ("suite", {"suite": "transformer", "device": "gpu"}, "devices"),
        ("profile", {"model": "net.py:make", "iterations": 3}, "rounds"),
        ("train", {"epochs": 3}, "steps"),
        ("audit", {"target": "net.py:make", "dtype": "fp8"}, "precision"),
    ],
)
def test_a_wrong_argument_of_a_call_names_the_right_one(name: str, given: dict[str, object], meant: str) -> None:
    with pytest.raises(UnknownName) as raised:
        getattr(fp8bench, name)(**given)
    assert raised.value.nearest == meant and "help(fp8bench." in str(raised.value)


@pytest.mark.slow
def test_a_class_is_no_kernel(store: Path, fp8bench: Say) -> None:
    Path("net.py").write_text("class Kernel:\n    def __call__(self, a, b): ...\n")
    code, _, err = fp8bench("audit", "net.py:Kernel")
    assert code == 2 and "is a class, but a kernel is a function" in " ".join(err.split())


def test_nothing_is_meant_by_a_word_that_is_like_no_name() -> None:
    """Words of other tools count only if the name is known there, and valid words are never replaced."""
    assert guess_intended_name("argument", "--batch-size", ["--batch", "--seed"]) == "--batch"
    assert guess_intended_name("argument", "--batch-size", ["--set", "--seed"]) == "--set batch="
    assert guess_intended_name("argument", "--batch-size", ["--seed"]) is None
    assert guess_intended_name("dtype", "half", ["bf16"]) is None and guess_intended_name("dtype", "", ["bf16"]) is None


def test_an_error_without_a_word_at_fault_has_no_correction() -> None:
    error = UsageError("no")
    assert (error.given, error.nearest, error.instead) == ("", None, ())
