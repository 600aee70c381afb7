"""The parts of real steps: of suites', and of one that is compiled."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from fp8bench.model import Request
from fp8bench.model.step import ShareKind, Shares, SharesFrom
from fp8bench.plan.corpus import Corpus
from fp8bench.plan.make import make_plan
from fp8bench.registry import workloads
from fp8bench.worker import shares_pass
from fp8bench.worker.bench import Bench
from tests.counts import sampled
from tests.worker.test_tape_pass import MORE, compiles

__all__ = ["compiles"]


@pytest.fixture(autouse=True)
def few_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shares_pass, "STEPS", 1)


def shares(bench: Bench, corpus: Corpus, suite: str, *dtypes: str, **axes: str) -> Iterator[tuple[str, Shares]]:
    facts = tuple(one for one in bench.probe() if one.key == "cpu")
    asked = Request(suite, dtypes, ("cpu",), axes=tuple((name, tuple(one.split(","))) for name, one in axes.items()))
    for group in make_plan(asked, facts, corpus.identity).groups:
        for one in filter(lambda one: one.runs, group.cases):
            yield one.case.id, bench.shares(one.case, facts[0])


def test_a_training_step(bench: Bench, corpus: Corpus) -> None:
    ((_, found),) = shares(bench, corpus, "transformer", "bf16", size="nano")
    assert sum(found.by_kind.values()) + found.unattributed == pytest.approx(1) and found.of is SharesFrom.OPERATORS
    assert set(found.by_kind) == set(ShareKind) - {ShareKind.UNKNOWN}
    assert all(0 < share < 1 for share in found.by_kind.values())
    layers = {part.module for part in found.parts if part.kind is ShareKind.GEMM}
    model = workloads.get("transformer").layers({"size": "nano"})
    assert layers == {layer.name for layer in model}
    for layer in layers:
        assert {part.backward for part in found.parts if part.module == layer} == {False, True}
    attention = [part for part in found.parts if part.kind is ShareKind.ATTENTION]
    assert {part.module for part in attention} == {"blocks.0.attn", "blocks.1.attn"}


@pytest.mark.slow
@pytest.mark.parametrize(
    "suite", sampled(["mlp"], ["transformer", "attention", "conv", "mlp", "norm_act", "optimizer"])
)
def test_no_suite_does_what_no_rule_knows(bench: Bench, corpus: Corpus, suite: str) -> None:
    found = list(shares(bench, corpus, suite, "bf16", "nvfp4", **MORE.get(suite, {})))
    assert found and not {name: one.parts for name, one in found if ShareKind.UNKNOWN in one.by_kind}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's own
@pytest.mark.usefixtures("compiles")
def test_a_compiled_step_is_its_kernels(bench: Bench, corpus: Corpus) -> None:
    """It stays compiled, and nothing else that is compiled afterwards tells the profiler its name."""
    from torch._inductor import config

    ((_, found),) = shares(bench, corpus, "compiles", "fp32")
    assert found.of is SharesFrom.COMPILED and {ShareKind.GEMM, ShareKind.ELEMENTWISE} <= set(found.by_kind)
    assert not config.cpp.enable_kernel_profile
