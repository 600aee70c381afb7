"""audit from words to tables, files and exit codes; and whose ceilings it holds a kernel against."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import pytest

from fp8bench.errors import UsageError
from fp8bench.features.audit.command import _ceilings, sound
from fp8bench.measure.ceilings import VARIABLE
from fp8bench.model import Ceilings, Limit, Rate
from fp8bench.model.promises import AuditKind, Signature, Takes
from fp8bench.user_code.named import audited, declared_of, signed
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


def refuses(a, b):
    raise RuntimeError("no kernel image")


number = 3
"""


@pytest.fixture
def kernels(tmp_path: Path) -> str:
    path = tmp_path / "kernels.py"
    path.write_text(KERNELS)
    return str(path)


def test_one_that_keeps_its_promise(kernels: str, fp8bench: Say) -> None:
    code, out, _ = fp8bench("audit", f"{kernels}:wide")
    assert code == 0 and "\nPASS: " in out[:400] and "printed by a kernel" not in out
    assert len(out.splitlines()) <= 20 and "what torch sees of a call" not in out


def test_one_that_does_not(kernels: str, tmp_path: Path, fp8bench: Say) -> None:
    """Its code, the smallest input, both errors; JUnit with a failure; JSON with everything."""
    junit = tmp_path / "audit.xml"
    code, out, _ = fp8bench("audit", f"{kernels}:fallback", "--json", "--junit", str(junit))
    told = json.loads(out)
    first = told["findings"][0]
    assert code == 1 and told["outcome"] == "FAIL"
    assert (first["check"], first["code"], first["input"]) == ("numbers", "not-cast", "M=8 N=8 K=64, normal")
    assert first["error"] < 0.1 * first["expected"]
    root = ET.parse(junit).getroot()
    assert int(root.attrib["failures"]) >= 1 and root.find(".//failure[@type='not-cast']") is not None


@pytest.mark.slow
@for_each(("name", "word"), [("crash", "crashes"), ("refuses", "raises")])
def test_one_that_gives_nothing(kernels: str, name: str, word: str, fp8bench: Say) -> None:
    code, out, _ = fp8bench("audit", f"{kernels}:{name}", "--kind", "product", "--precision", "fp8")
    assert code == 4 and word in out and "CANNOT TELL" in out


@pytest.mark.slow
@for_each(
    ("words", "sentence"),
    [
        (["{}:nothing"], "has no 'nothing'. Callables in it: wide, fallback, crash, refuses."),
        (["{}:number"], "is int, and cannot be called"),
        (["{}:crash"], "says nowhere what it promises"),
        (["nowhere.py:f"], "no such file"),
        (["plain"], "names no callable"),
        (["{}:crash", "--kind", "product", "--precision", "fp9"], "unknown dtype 'fp9'"),
        (["{}:crash", "--kind", "product", "--precision", "fp8-delayed"], "audit it as fp8"),
        (["{}:crash", "--kind", "cast", "--precision", "fp32"], "nothing is cast in fp32"),
        (["{}:wide", "--kind", "product", "--precision", "bf16", "--baseline", "{}:nothing"], "has no 'nothing'"),
        (["{}:wide", "--kind", "optimizer", "--precision", "e4m3-8000"], "has blocks of 8000"),
    ],
)  # fmt: skip
def test_what_cannot_be_audited_is_a_sentence(kernels: str, words: list[str], sentence: str, fp8bench: Say) -> None:
    code, _, err = fp8bench("audit", *(word.format(kernels) for word in words))
    assert code == 2 and sentence in " ".join(err.split())


def test_options_that_a_declared_kernel_would_not_hear_are_refused(kernels: str, fp8bench: Say) -> None:
    for words in (["--second", "kn"], ["--causal"], ["--multiple", "16"], ["--takes", "codes"]):
        code, _, err = fp8bench("audit", f"{kernels}:wide", *words)
        assert code == 2 and "go with --kind and --precision" in " ".join(err.split())


def test_codes_that_torch_has_no_dtype_for() -> None:
    with pytest.raises(UsageError, match="torch has no dtype for mxfp6's codes"):
        sound(signed("product", "mxfp6", "codes"), CPU)


def test_one_half_of_a_signature_is_none(kernels: str, fp8bench: Say) -> None:
    code, _, err = fp8bench("audit", f"{kernels}:wide", "--kind", "product")
    assert code == 2 and "--kind was given without --precision" in err


def test_the_decorator_leaves_the_function_alone() -> None:
    @audited("product", "mxfp8", takes="codes", second="kn", multiple=32)
    def kernel(a: int) -> int:
        return a + 1

    assert kernel(1) == 2
    assert declared_of(kernel) == Signature(AuditKind.PRODUCT, "mxfp8", Takes.CODES, "kn", 32)
    assert declared_of(len) is None


@for_each(
    ("given", "sentence"),
    [
        (("gemm", "fp8"), "kind is .gemm.. Give one of product, cast, linear, attention, optimizer, model"),
        (("product", "fp8", "bytes"), "takes is 'bytes'"),
        (("product", "fp8", "values", "mn"), "second is 'mn'"),
        (("product", "fp8", "values", "nk", 0), "multiple is 0"),
        (("cast", "fp8", "codes"), "only a product can be given codes"),
        (("linear", "fp8", "values", "kn"), "a linear has no second operand that could lie otherwise"),
        (("product", "fp8", "values", "nk", 1, True), "a product cannot be causal"),
        (("product", "fp8", "values", "nk", 1, False, "sgd"), "a product has no rule, second moment or weights"),
        (("optimizer", "fp8", "values", "nk", 16), "an optimizer takes tensors of all sizes"),
        (("optimizer", "fp8", "values", "nk", 1, False, "sgd", "same"), "sgd has no second moment"),
        (("optimizer", "fp8", "values", "nk", 1, False, "lamb"), "rule is 'lamb'. Give one of adamw, adam, sgd"),
        (("optimizer", "fp8", "values", "nk", 1, False, "adam", "", "int8"), "weights is 'int8'"),
        (("model", "", "values", "nk", 1, False, "adamw", "", "fp32", "own.py:f"), "a model is not timed"),
    ],
)  # fmt: skip
def test_a_signature_that_cannot_be(given: tuple[str, ...], sentence: str) -> None:
    with pytest.raises(UsageError, match=sentence):
        signed(*given)


QUICK = Ceilings((Rate(Limit.PRODUCT, "fp32", shape=(1,), runs=(1e12,)),))


class Worker:
    """Counts quick looks."""

    def __init__(self) -> None:
        self.looks = 0

    def software(self) -> dict[str, str]:
        return {"torch": "2"}

    def within(self, _: float) -> Worker:
        return self

    def ceilings(self, *_: Any) -> Ceilings:
        self.looks += 1
        return QUICK


def asked(worker: Any, store: Path, threads: int = 1) -> float | None:
    found = _ceilings(worker, CPU, threads, store)
    return None if found is None else found.bound(Limit.PRODUCT, "fp32")


def test_a_quick_look_is_taken_once_where_there_is_a_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "measured")
    worker = Worker()
    assert asked(worker, tmp_path) == asked(worker, tmp_path) == 1e12 and worker.looks == 1
    assert asked(worker, tmp_path, threads=4) == 4e12, "a quick look is of one thread"
    assert asked(worker, tmp_path / "none") == asked(worker, tmp_path / "none") == 1e12
    assert worker.looks == 2, "and where there was none"


def test_where_nothing_is_to_be_measured_what_is_kept_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "measured")
    assert asked(Worker(), tmp_path) == 1e12
    monkeypatch.setenv(VARIABLE, "off")
    worker = Worker()
    assert asked(worker, tmp_path / "none") is None and asked(worker, tmp_path) == 1e12 and worker.looks == 0
