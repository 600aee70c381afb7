"""Findings of lint-shapes, its exit codes, and that suites refuse the same shapes."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
from pathlib import Path

import pytest

from fp8bench import pipeline
from fp8bench.features.lint_shapes.command import (
    LinearShape,
    ShapeFinding,
    find_layer_shapes,
    judge_all_products,
    judge_product_shape,
)
from fp8bench.formats.hardware import A100, B200, CPU, DEVICE_CLASSES, H100, L40S, MI300X, MI350X, RTX5090, DeviceClass
from fp8bench.measure.handle import LocalWorker
from fp8bench.model import Level
from fp8bench.nn.shared_precisions import RecipePrecision
from fp8bench.nn.sizes import OPERAND_ROLES
from fp8bench.registry import precisions, workloads
from tests import facts
from tests.commands import Say, only_sentence, unfolding
from tests.counts import for_each


@pytest.fixture
def say(store: Path, fp8bench: Say) -> Say:
    return unfolding(fp8bench, "lint-shapes")


@for_each(
    ("words", "code", "message"),
    [
        ("llama3-8b --devices h100,a100 --dtypes fp8", 0, "h100 all a100 - why a device has no such product"),
        ("nano --devices cpu", 3, "no CPU has units for it: emulated, in any shape"),
        ("gpt2 --devices l40s --dtypes fp8", 3, "head forward 8192 x 50257 x 768 8192 x 50272 x 768 N=50257 is no"),
        ("nano --devices h100 --dtypes fp8-e5m2", 3, "no padding helps two E5M2 operands are not multiplied"),
    ],
)
def test_fitting_and_unfitting_shapes_are_listed(say: Say, words: str, code: int, message: str) -> None:
    ended, out, _ = say(*words.split())
    assert ended == code and message in " ".join(out.split()), out


@for_each(
    ("words", "message"),
    [
        ("gpt3", "Did you mean 'gpt2'"),
        ("net.py", "is not a function"),
        ("net.py:make --tokens 4", "--tokens only works with named models"),
        ("gpt2 --tokens 0", "expected a whole number from 1"),
        ("gpt2 --dtypes fp32", "fp32 has no scales"),
        ("gpt2 --devices h1000", "Did you mean 'h100'"),
    ],
)
def test_bad_arguments_are_refused(say: Say, words: str, message: str) -> None:
    code, out, err = say(*words.split())
    assert (code, out) == (2, "") and message in only_sentence(err)


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
    file = Path("own_net.py").resolve()  # its module stays in this process, under a name that no other test uses
    file.write_text(NET)
    monkeypatch.setattr(pipeline, "ProcessWorker", LocalWorker)
    code, out, _ = say(f"{file}:make", "--devices", "h100", "--dtypes", "fp8", "--json")
    shapes = {(row["layer"], *row["sides"]) for row in json.loads(out) if row["product"] == "forward"}
    assert code == 3 and shapes == {("0.0", 16, 50, 32), ("0.2", 16, 32, 50), ("2", 8, 16, 32)}
    code, _, err = say(f"{file}:images")
    assert code == 2 and "calls no linear layer" in err


def test_no_torch_is_needed() -> None:
    """The rules are plain values: they work without a GPU and without torch."""
    script = (
        "import sys; sys.modules['torch'] = None; from fp8bench.cli.main import main; "
        "sys.exit(main(['lint-shapes', 'llama3-8b', '--dtypes', 'fp8,nvfp4']))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_models_have_their_layers_and_their_tokens() -> None:
    gpt2 = find_layer_shapes("gpt2", None)
    assert [shape.name for shape in gpt2] == ["qkv", "out", "up", "down", "head"] and gpt2[-1].outputs == 50257
    for model, asked, tokens in (("gpt2", None, 8192), ("nano", None, 192), ("nano", 7, 7)):
        assert {shape.tokens for shape in find_layer_shapes(model, asked)} == {tokens}


FACTS = {
    A100: facts.A100,
    L40S: facts.gpu("L40S", (8, 9)),
    H100: facts.H200,
    B200: facts.B200,
    RTX5090: facts.gpu("RTX 5090", (12, 0)),
    MI300X: facts.MI300X,
    MI350X: facts.MI350X,
    CPU: facts.CPU,
}
SIDES = (16, 17, 24, 32)


def recipe(mode: str) -> RecipePrecision:
    precision = precisions.get(mode)
    assert isinstance(precision, RecipePrecision)
    return precision


def lint(shape: LinearShape, mode: str, device: DeviceClass, kind: str = "forward") -> ShapeFinding:
    return judge_product_shape(shape, kind, recipe(mode), device)


def scaled_modes() -> list[str]:
    """Every mode with a recipe, with default options."""
    return [name for name in precisions.names() if isinstance(precisions.get(name), RecipePrecision)]


@for_each("device", DEVICE_CLASSES, ids=lambda one: one.name)
@for_each("mode", scaled_modes())
def test_what_a_suite_takes_natively_the_lint_takes_and_the_other_way_round(mode: str, device: DeviceClass) -> None:
    precision = precisions.get(mode)
    if precision.support(FACTS[device]).level is not Level.NATIVE:
        return
    gemm = workloads.get("gemm")
    for m, n, k in itertools.product(SIDES, repeat=3):
        found = lint(LinearShape("", m, n, k), mode, device)
        params = {"m": m, "n": n, "k": k, "product": "forward", "operands": "cast"}
        support = gemm.support(params, precision, FACTS[device])
        assert found.exists and found.fits == (support.level is Level.NATIVE), (m, n, k)
        assert found.fits or found.padded


def test_what_fp8bench_has_natively_has_all_three_products() -> None:
    assert set(FACTS) == set(DEVICE_CLASSES)
    pairs = []
    for mode in scaled_modes():
        support = precisions.get(mode).support
        pairs += [(mode, device) for device in DEVICE_CLASSES if support(FACTS[device]).level is Level.NATIVE]
    assert ("fp8", H100) in pairs
    for (mode, device), kind in itertools.product(pairs, OPERAND_ROLES):
        assert lint(LinearShape("", 64, 64, 64), mode, device, kind).fits, (mode, device, kind)


def test_each_product_contracts_over_another_side() -> None:
    """An odd vocabulary breaks the forward product by N and the input gradient by K.

    Odd tokens break the weight gradient.
    """
    head = LinearShape("head", 8192, 50257, 768)
    by_kind = {kind: lint(head, "fp8", H100, kind) for kind in OPERAND_ROLES}
    assert by_kind["forward"].padded == (8192, 50272, 768)
    assert by_kind["input-gradient"].padded == (8192, 768, 50272)
    assert by_kind["weight-gradient"].fits
    odd = lint(LinearShape("out", 100, 768, 768), "fp8", H100, "weight-gradient")
    assert odd.padded == (768, 768, 112)


def test_a_padded_product_fits() -> None:
    for mode, device in itertools.product(scaled_modes(), DEVICE_CLASSES):
        for m, n, k in itertools.product((1, 17, 50257), repeat=3):
            found = lint(LinearShape("", m, n, k), mode, device)
            if found.padded:
                assert lint(LinearShape("", *found.padded), mode, device).fits, (mode, device, found.padded)


def test_options_of_modes_change_the_rules() -> None:
    """NVIDIA has no product of two E5M2 operands; a bf16 weight gradient is not a scaled product."""
    shape = LinearShape("", 64, 64, 64)
    refused = lint(shape, "fp8:formats=e5m2", H100)
    assert refused.exists and not refused.fits and refused.padded is None
    assert lint(shape, "fp8-e5m2", MI350X).fits
    findings = judge_all_products([shape], [recipe("fp8:weight-gradient=bf16")], [H100])
    assert [finding.product for finding in findings] == ["forward", "input-gradient"]
