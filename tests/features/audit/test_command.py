"""audit from words to tables, files and exit codes; and whose ceilings it holds a kernel against."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from fp8bench.errors import UsageError
from fp8bench.features.audit.command import _load_or_measure_ceilings
from fp8bench.model import Ceilings, Limit, Rate
from fp8bench.model.promises import AuditedCallableKind, CallablePromise, OperandForm
from fp8bench.plan.resolve import CEILINGS_VARIABLE as VARIABLE
from fp8bench.user_code.named import audited, find_declared_signature, make_signature
from tests.commands import Say
from tests.counts import for_each
from tests.facts import CPU

KERNELS = """\
import os

import torch

import fp8bench


@fp8bench.audited("product", "bf16")
def wide(a, b):
    print("printed by a kernel")
    return a @ b.t()


@fp8bench.audited("product", "fp8")
def fallback(a, b):
    return a @ b.t()


def crash(a, b):
    os._exit(3)


def three():
    return 3


def leaves(a, b):
    raise SystemExit(0)


class Fp8Linear(torch.nn.Linear):
    pass


def make():
    return torch.nn.Sequential(Fp8Linear(64, 64), torch.nn.Linear(64, 50)), torch.randn(4, 64)


number = 3
"""


@pytest.fixture
def kernels(tmp_path: Path) -> str:
    path = tmp_path / "kernels.py"
    path.write_text(KERNELS)
    return str(path)


@pytest.mark.slow
def test_a_kernel_that_keeps_its_promise_passes(kernels: str, fp8bench: Say) -> None:
    code, out, _ = fp8bench("audit", f"{kernels}:wide")
    assert code == 0 and "\nPASS: " in out[:400] and "printed by a kernel" not in out
    assert len(out.splitlines()) <= 20


@pytest.mark.slow
def test_a_kernel_that_breaks_its_promise_fails(kernels: str, fp8bench: Say) -> None:
    code, out, _ = fp8bench("audit", f"{kernels}:fallback", "--json")
    told = json.loads(out)
    first = told["findings"][0]
    assert code == 1 and told["outcome"] == "FAIL"
    assert (first["check"], first["code"], first["input"]) == ("numbers", "not-cast", "M=64 N=96 K=256, normal")
    assert first["error"] < 0.1 * first["expected"]


@for_each("words", ["--kind product", "--second kn", "--causal", "--multiple 16", "--takes codes"])
def test_options_without_effect_on_a_declared_kernel_are_refused(kernels: str, words: str, fp8bench: Say) -> None:
    code, _, err = fp8bench("audit", f"{kernels}:wide", *words.split())
    told = "without --precision" if "--kind" in words else "need --kind and --precision"
    assert code == 2 and told in " ".join(err.split())


@pytest.mark.slow
@for_each(
    ("words", "code", "told"),
    [
        ("{}:crash --kind product --precision fp8", 4, "crashes"),
        ("{}:three --kind product --precision fp8", 4, "The audit calls it as f(a, b)"),
        ("{}:leaves --kind product --precision fp8", 4, "raises: SystemExit"),
        ("{}:make --kind model", 1, "1 of 2 layers converted, 56% of the FLOPs"),
        ("{}:three --kind model", 2, "expected a model or (model, batch)"),
        ("{}:nothing", 2, "has no 'nothing'. Callables in it: wide, fallback, "),
        ("{}:number", 2, "is int, and cannot be called"),
        ("{}:crash", 2, "does not declare what it promises"),
        ("nowhere.py:f", 2, "no such file"),
        ("plain", 2, "is not a function"),
        ("torch.matmul", 2, "Write a colon before the function: torch:matmul"),
        ("{}:crash --kind product --precision fp9", 2, "unknown precision 'fp9'"),
        ("{}:crash --kind product --precision fp8-delayed", 2, "Audit it as fp8"),
        ("{}:crash --kind product --precision mxfp6 --takes codes", 2, "torch has no dtype for the codes of mxfp6"),
    ],
)
def test_targets_that_cannot_be_audited_give_a_message(
    kernels: str, words: str, code: int, told: str, fp8bench: Say
) -> None:
    ended, out, err = fp8bench("audit", *(word.format(kernels) for word in words.split()))
    assert ended == code and told in " ".join((out + err).split()) and ("CANNOT TELL" in out) == (code == 4)


@for_each(
    ("given", "sentence"),
    [
        ({"kind": "gemm"}, "Give one of product, linear, attention, model"),
        ({"takes": "bytes"}, "takes is 'bytes'"),
        ({"second": "mn"}, "second is 'mn'"),
        ({"multiple": 0}, "multiple is 0"),
        ({"kind": "linear", "takes": "codes"}, "only a product can be given codes"),
        ({"kind": "linear", "second": "kn"}, "a linear has no second operand"),
        ({"causal": True}, "a product cannot be causal"),
    ],
)
def test_an_impossible_signature_is_refused(given: dict[str, Any], sentence: str) -> None:
    with pytest.raises(UsageError, match=sentence):
        make_signature(**{"kind": "product", "precision": "fp8", **given})


def test_the_decorator_leaves_the_function_alone() -> None:
    @audited("product", "mxfp8", takes="codes", second="kn", multiple=32)
    def kernel(a: int) -> int:
        return a + 1

    assert kernel(1) == 2
    assert find_declared_signature(kernel) == CallablePromise(
        AuditedCallableKind.PRODUCT, "mxfp8", OperandForm.CODES, "kn", 32
    )
    assert find_declared_signature(len) is None


CEILINGS = Ceilings((Rate(Limit.PRODUCT, "fp32", shape=(1,), runs=(1e12,) * 5),))


def test_ceilings_are_measured_once_where_there_is_a_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    measured = []
    worker = SimpleNamespace(software=lambda: {"torch": "2"})
    monkeypatch.setattr("fp8bench.features.audit.command.measure_ceilings", lambda *_: measured.append(1) or CEILINGS)

    def asked(store: Path) -> float | None:
        found = _load_or_measure_ceilings(worker, CPU, 1, store)  # type: ignore[arg-type]
        return None if found is None else found.bound(Limit.PRODUCT, "fp32")

    monkeypatch.setenv(VARIABLE, "measured")
    assert asked(tmp_path) == asked(tmp_path) == 1e12 and len(measured) == 1
    assert asked(tmp_path / "none") == asked(tmp_path / "none") == 1e12 and len(measured) == 2
    monkeypatch.setenv(VARIABLE, "off")
    assert asked(tmp_path) == 1e12 and asked(tmp_path / "nowhere") is None and len(measured) == 2
