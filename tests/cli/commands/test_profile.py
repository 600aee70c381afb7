"""profile from words to tables, files and exit codes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.commands import Say, unfolded

MAKERS = """\
import os

import torch
from torch import nn


class Stuck(nn.Linear):
    def __deepcopy__(self, memo):
        raise TypeError("cannot pickle '_thread.lock' object")


class Large(nn.Linear):
    def __deepcopy__(self, memo):
        raise MemoryError


def make():
    return nn.Sequential(nn.Linear(32, 48), nn.GELU(), nn.Linear(48, 16)), torch.randn(8, 32)


def fails():
    return nn.Linear(3, 4), torch.randn(2, 5)


def wants(size):
    return make()


def without_batch():
    return nn.Linear(16, 16)


def stuck():
    return Stuck(16, 16), torch.randn(16, 16)


def large():
    return Large(16, 16), torch.randn(16, 16)


def elsewhere():
    return nn.Linear(16, 16), torch.randn(16, 16, device="meta")


class Alternating(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.calls = nn.Linear(16, 16), nn.Linear(16, 64), 0

    def forward(self, x):
        self.calls += 1
        return self.b(self.a(x)) if self.calls % 2 else self.a(x)


def alternating():
    return Alternating(), torch.randn(16, 16)


def complex_numbers():
    return nn.Linear(8, 8, dtype=torch.complex64), torch.randn(4, 8, dtype=torch.complex64)


def without_products():
    return nn.Sequential(nn.ReLU(), nn.LayerNorm(8)), torch.randn(4, 8)


def frozen():
    return nn.Linear(16, 16).requires_grad_(False), torch.randn(16, 16)


def raises():
    raise ValueError("no checkpoint here")


def crashes():
    os._exit(3)


number = 3
"""


@pytest.fixture
def makers(store: Path) -> str:
    Path("makers.py").write_text(MAKERS)
    return "makers.py"


@pytest.mark.slow
def test_a_model_as_it_came_beside_its_copies(makers: str, fp8bench: Say, short_slots: None) -> None:
    code, out, _ = fp8bench(
        "profile", f"{makers}:make", "--dtypes", "bf16,mxfp4", "--rounds", "2", "--no-report", "--json"
    )
    run = json.loads(out)
    records = {record["case"]["precision"]: record for record in run["records"]}
    assert code == 0 and list(records) == ["untouched", "bf16", "mxfp4"]
    assert [record["is_reference"] for record in records.values()] == [True, False, False]
    errors = {
        name: {measurement["metric"]: measurement["samples"][0] for measurement in record["measurements"]}
        for name, record in records.items()
    }
    assert errors["untouched"]["output_error"] == errors["untouched"]["gradient_error"] == 0.0
    for metric in ("output_error", "gradient_error"):
        assert 0 < errors["bf16"][metric] < 0.02 < errors["mxfp4"][metric] < 1
    assert all(record["memory"]["peak"] > 0 for record in records.values())
    assert records["untouched"]["coverage"] is None
    (first, last), flops = records["bf16"]["coverage"]["holders"], records["bf16"]["coverage"]["flops"]
    assert first["flops"] + last["flops"] == flops == 2 * 8 * (2 * 32 * 48 + 3 * 48 * 16)  # x needs no gradient
    phases = {name: {one for one, _ in record["timing"]["entries"]} for name, record in records.items()}
    assert phases["untouched"] == {"data_load", "optimizer_step", "unattributed"}
    assert phases["bf16"] == {*phases["untouched"], "cast", "gemm"}


def test_steps_that_are_not_alike_are_said_to_be(makers: str, fp8bench: Say, short_slots: None) -> None:
    """Every second call takes a different branch."""
    words = ("--dtypes", "bf16", "--rounds", "2", "--no-report", "--no-isolation", "--no-energy")
    assert fp8bench("profile", f"{makers}:alternating", *words)[0] == 0
    whole = fp8bench("show", "last", "--all")[1]
    assert (
        "varying-steps" in whole
        and "steps are not alike: the first multiplies 115 kFLOP, the second 16.4" in unfolded(whole)
    ), whole
    assert "(one draw)" in whole


# Command-line words and expected output. The first rows always run.
WRONG = [
    (["{}:complex_numbers"], "its parameter weight is complex64, but casts, optimizers and errors need real"),
    (["{}:fails"], "fails in forward: RuntimeError: mat1 and mat2 shapes cannot be multiplied"),
    (["{}:nosuch"], "makers.py has no 'nosuch'. Callables in it: Stuck"),
    (["{}:make", "--forward", "--optimizer", "sgd"], "--forward has no optimizer step"),
    (["{}:number"], "is int, and cannot be called"),
    (["{}:wants"], "is called without arguments, and missing a required argument: 'size'"),
    (["{}:without_batch"], "returns Linear; expected (model, batch)"),
    (["{}:without_products"], "can be converted"),
    (["{}:stuck"], "cannot be copied, but every arm needs a copy: TypeError: cannot pickle"),
    (["{}:large"], "not enough memory for it and a copy"),
    (["{}:elsewhere"], "the batch is on meta, but the model is measured on cpu"),
    (["{}:frozen"], "needs a gradient. Use --forward"),
    (["{}:raises"], "fails: ValueError: no checkpoint here (makers.py, line"),
    (["nosuch:make"], "No module named 'nosuch'"),
    (["nosuch"], "is not a function. Give module:function"),
    (["{}:make", "--dtypes", "nosuch"], "unknown precision 'nosuch'"),
    (["{}:make", "--skip", "nosuch"], "unknown layer of this model 'nosuch'"),
    (["{}:make", "--precision-map", "9=bf16"], "unknown layer of this model '9'"),
    (["{}:make", "--compile", "--dtypes", "fp8-delayed", "--json", "--csv", "-"], "would both print on stdout"),
]  # fmt: skip
ALWAYS = 3


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        pytest.param(*row, marks=[pytest.mark.nightly] * (place >= ALWAYS), id=" ".join(row[0]))
        for place, row in enumerate(WRONG)
    ],
)
def test_what_cannot_be_is_a_sentence(words: list[str], sentence: str, makers: str, store: Path, fp8bench: Say) -> None:
    code, _, error = fp8bench("profile", *(word.format(makers) for word in words), "--no-isolation")
    assert code == 2 and sentence in unfolded(error), error
    assert not [*store.rglob("*.jsonl")]


@pytest.mark.slow
def test_a_maker_that_ends_its_process(makers: str, store: Path, fp8bench: Say) -> None:
    code, _, error = fp8bench("profile", f"{makers}:crashes")
    assert code == 3 and "the worker crashed during 'examine'" in unfolded(error)
    assert not [*store.rglob("*.jsonl")]


def test_untouched_needs_a_model(store: Path, fp8bench: Say) -> None:
    code, out, _ = fp8bench("suite", "gemm", "--dtypes", "untouched,bf16", "--dry-run")
    assert code == 0 and "no model was given. Give it: `fp8bench train" in " ".join(out.split())
    code, _, error = fp8bench("suite", "model")
    assert code == 2 and "expected module:function" in unfolded(error)
