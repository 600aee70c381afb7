"""The tapes of fp8bench's own suites against what these declare, the parts of real steps, and compiled functions."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count

import pytest

from fp8bench.analysis.claims import label_false_claims
from fp8bench.model import Label, Record, Request, Status, Tape
from fp8bench.model.step import ShareKind, Shares, SharesFrom
from fp8bench.plan.corpus import Corpus
from fp8bench.plan.make import make_plan
from fp8bench.registry import precisions, workloads
from fp8bench.worker import tape_pass
from fp8bench.worker.bench import Bench
from tests.counts import sampled
from tests.own_suites import suite_file


def records(bench: Bench, corpus: Corpus, suite: str, *dtypes: str, **axes: str) -> list[Record]:
    facts = tuple(device for device in bench.probe() if device.key == "cpu")
    asked = Request(suite, dtypes, ("cpu",), axes=tuple((name, tuple(text.split(","))) for name, text in axes.items()))
    found = []
    for group in make_plan(asked, facts, corpus.identity).groups:
        for one in filter(lambda one: one.runs, group.cases):
            tape = bench.tape(one.case, facts[0])
            found.append(Record(one.case, one.support, Status.OK, one.work, tape=tape))
    return found


def mismatches(found: list[Record]) -> dict[str, str]:
    return {
        record.case.id: label.reason
        for record in found
        for label in label_false_claims(record, None)
        if label.label in (Label.WORK_MISMATCH, Label.NO_WORK)
    }


def test_products_are_what_their_suite_declares(bench: Bench, corpus: Corpus) -> None:
    found = records(bench, corpus, "gemm", "fp32", "bf16", "fp8", shape="64")
    assert [record.tape.flops for record in found if record.tape] == [2 * 64**3] * 3
    emulated = found[2].tape
    assert emulated is not None and [phase.phase for phase in emulated.phases] == ["cast", "gemm"]
    assert emulated.by_path == {"fp32": 2 * 64**3} and not mismatches(found)


def test_a_suite_without_a_model_has_no_coverage(bench: Bench, corpus: Corpus) -> None:
    (record,) = records(bench, corpus, "gemm", "fp32", shape="64")
    (facts,) = (device for device in bench.probe() if device.key == "cpu")
    assert bench.coverage(record.case, facts) is None


def test_a_training_step_is_its_linear_layers_and_attention(bench: Bench, corpus: Corpus) -> None:
    """Attention has a seventh product, because backward recomputes the scores."""
    (found,) = records(bench, corpus, "transformer", "bf16", size="nano")
    tape = found.tape
    assert tape is not None and not tape.unknown and not tape.unwritten and not tape.fused
    attention = sum(one.calls * (one.flops or 0) for one in tape.operators if "attention" in one.operator)
    assert tape.flops - attention + attention * 6 // 7 == found.work.flops and not mismatches([found])
    directions = {operator.backward: operator for operator in tape.operators if operator.operator == "mm"}
    assert set(directions) == {False, True}


@pytest.mark.slow
@pytest.mark.parametrize("suite", sampled(("mlp", "cast"), workloads.names()))
def test_every_suite_agrees_with_its_tape_in_every_precision(bench: Bench, corpus: Corpus, suite: str) -> None:
    found = records(bench, corpus, suite, *precisions.names(), **MORE.get(suite, {}))
    assert found and not mismatches(found)
    decoded = {"data"}  # by numpy, from a file: one tensor that no torch operator wrote
    unwritten = {record.case.id for record in found if record.tape and record.tape.unwritten > (suite in decoded)}
    assert not unwritten and all(record.tape is not None and not record.tape.unknown for record in found)


MORE = {
    "transformer": {"size": "nano", "checkpointing": "no,blocks"},
    "attention": {"scores": "high,low", "part": "core,layer", "pass": "forward,training", "sequence": "128"},
    "gemm": {"shape": "64"},
    "mlp": {"pass": "forward,training"},
}

COMPILED = """
import torch

from fp8bench.suites import Work, Workload, workloads


@workloads.register("compiles")
class Compiles(Workload):
    name = "compiles"
    summary = "a compiled product"

    def axes(self, facts):
        return ()

    def work(self, params):
        return Work(flops=2.0 * 32**3)

    def prepare(self, setup):
        return torch.compile(lambda x: (x @ x).relu().sum()), torch.ones(32, 32)

    def step(self, state, phase):
        function, x = state
        with phase.gemm:
            function(x)
"""


@pytest.fixture
def compiles(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with suite_file(tmp_path_factory.mktemp("compiles"), COMPILED):
        yield


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's operator
@pytest.mark.usefixtures("compiles")
def test_a_compiled_function_runs_as_what_it_was_made_of(bench: Bench, corpus: Corpus) -> None:
    import torch
    from torch._dynamo.utils import counters

    before = counters["stats"]["unique_graphs"]
    (found,) = records(bench, corpus, "compiles", "fp32")
    assert isinstance(found.tape, Tape) and found.tape.fused.startswith("torch.compile: ")
    assert [operator.operator for operator in found.tape.operators] == ["mm", "relu", "sum"]
    assert counters["stats"]["unique_graphs"] == before
    torch.compile(lambda x: x.exp().sum())(torch.ones(8))
    assert counters["stats"]["unique_graphs"] == before + 1


@pytest.fixture(autouse=True)
def few_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tape_pass, "MAX_STEPS", 1)


def test_steps_end_after_some_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first is a warm-up, and the only one if it exceeds the total time."""
    monkeypatch.setattr(tape_pass, "MAX_STEPS", 5)
    assert list(tape_pass._iterate_turns_until_limit()) == [0, 1, 2, 3, 4, 5]
    for seconds, turns in ((tape_pass.MAX_SECONDS, [0, 1]), (tape_pass.MAX_SECONDS + 1, [0])):
        clock = count(10.0, seconds)
        monkeypatch.setattr(tape_pass.time, "perf_counter", lambda clock=clock: next(clock))
        assert list(tape_pass._iterate_turns_until_limit()) == turns


def shares(bench: Bench, corpus: Corpus, suite: str, *dtypes: str, **axes: str) -> Iterator[tuple[str, Shares]]:
    facts = tuple(device for device in bench.probe() if device.key == "cpu")
    asked = Request(suite, dtypes, ("cpu",), axes=tuple((name, tuple(text.split(","))) for name, text in axes.items()))
    for group in make_plan(asked, facts, corpus.identity).groups:
        for planned in filter(lambda planned: planned.runs, group.cases):
            yield planned.case.id, bench.shares(planned.case, facts[0])


def test_a_training_step(bench: Bench, corpus: Corpus) -> None:
    ((_, found),) = shares(bench, corpus, "transformer", "bf16", size="nano")
    assert (
        sum(found.by_kind.values()) + found.unattributed_share == pytest.approx(1) and found.of is SharesFrom.OPERATORS
    )
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
    assert found and not {name: shares.parts for name, shares in found if ShareKind.UNKNOWN in shares.by_kind}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's operator
@pytest.mark.usefixtures("compiles")
def test_a_compiled_step_has_no_shares(bench: Bench, corpus: Corpus) -> None:
    ((_, found),) = shares(bench, corpus, "compiles", "fp32")
    assert isinstance(found, str) and found.startswith("a compiled step calls no operator")
