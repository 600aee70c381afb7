"""Users' models, and the largest batch at which arms pay."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import product
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch

from fp8bench.cli.progress import TERMINAL_JOB_OBSERVER
from fp8bench.features.infer import job
from fp8bench.features.infer.job import collect_arm_times, complete_serving_question
from fp8bench.features.infer.quality import RANDOM_TOKENS, InferBench
from fp8bench.features.infer.values import QualityTask, ServedModel, ServingAnswer, ServingQuestion
from fp8bench.features.infer.view import encode_answer, table_rows
from fp8bench.model import Level, Record, Run, Segments, SlotSample, Status, Timing
from fp8bench.model.raw import Settings
from fp8bench.nn.served import USER_MODEL_SHAPES, ServedShape, step_bytes
from fp8bench.nn.served import ServedArm as Arm
from fp8bench.protocols import SilentPhases
from fp8bench.registry import precisions, workloads
from fp8bench.worker.bench import Bench
from fp8bench.worker.finite import InitialFiniteElements
from tests.commands import Say
from tests.counts import for_each
from tests.fakes import steady
from tests.nn import served_models
from tests.runs import NATIVE, case, run_of
from tests.workloads.steps import CPU, H200, marks, phases, setup_of, small

MODELS = "tests.nn.served_models"


@pytest.fixture
def user_model(monkeypatch: pytest.MonkeyPatch) -> str:
    """The name of a maker after registering its model's shape."""
    maker = f"{MODELS}:own"
    bench = InferBench(Settings())
    monkeypatch.setitem(USER_MODEL_SHAPES, maker, ServedShape(*bench.read_shape(maker, CPU, 0)))
    return maker


def test_a_step_of_a_model_of_ones_own(user_model: str) -> None:
    for name, new in (("decode", 1), ("prefill", 24)):
        workload = workloads.get(name)
        for precision in ("fp32", "bf16", "served:weights=int8", "served:kv=fp8:weights=int4"):
            setup = setup_of(
                name,
                {"size": user_model, "batch": 2, "context": 24, "kv": "own", "weights": "own"},
                precision,
            )
            state = workload.prepare(setup)
            assert state.tokens.shape == (2, new) and state.at == 24 - new
            workload.step(state, SilentPhases())
            first = state.logits.clone()
            assert bool(first.isfinite().all()) and first.abs().sum() > 0
            assert "gemm" in marks(workload, state)
            assert torch.equal(first, state.logits)
        assert 0 < workload.error(small(name, "bf16", **dict(setup.case.params)))["logits_error"] < 0.05
        assert workload.work(dict(setup.case.params)).tokens == 2 * new


@pytest.mark.slow
def test_its_quality_is_read_on_its_own_tokens_or_on_random_ones(user_model: str) -> None:
    bench, arms = InferBench(Settings()), (Arm("fp32"), Arm("bf16"), Arm("bf16", "nvfp4"))
    quality = bench.measure_quality(QualityTask(ServedModel(user_model), 512, arms, CPU, 0))
    assert not quality.caution and quality.tokens == 3 * 16
    assert quality.itself.kl == 0 < quality.arms[0].kl < quality.arms[1].kl
    assert quality.arms[0].bits == 16.0
    drawn = bench.measure_quality(QualityTask(ServedModel(f"{MODELS}:llama"), 256, arms, CPU, 0))
    assert drawn.caution == RANDOM_TOKENS and drawn.tokens == 256 and drawn.itself.kl == 0 < drawn.floor.kl


def test_quality_of_a_model_that_masks_ids() -> None:
    task = QualityTask(ServedModel(f"{MODELS}:masking"), 0, (Arm("fp32"), Arm("bf16")), CPU, 0)
    quality = InferBench(Settings()).measure_quality(task)
    assert quality.itself.kl == 0 < quality.floor.kl < 1e-9 < quality.arms[0].kl < 1e-3


def test_an_arm_with_nan_is_reported_and_samples_nothing() -> None:
    task = QualityTask(ServedModel(f"{MODELS}:nan_in_bf16"), 256, (Arm("fp32"), Arm("bf16")), CPU, 0, 2)
    quality = InferBench(Settings()).measure_quality(task)
    lead, low = quality.rollouts
    assert math.isnan(quality.arms[0].kl) and math.isnan(low.mean) and low.clipped == 1 and lead.mean < 1e-5


def test_a_masking_model_is_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    name = f"{MODELS}:masking"
    monkeypatch.setitem(USER_MODEL_SHAPES, name, ServedShape(*InferBench(Settings()).read_shape(name, CPU, 0)))
    setup = setup_of("decode", {"size": name, "batch": 2, "context": 24, "kv": "own", "weights": "own"}, "bf16")
    workload = workloads.get("decode")
    state = workload.prepare(setup)
    before = InitialFiniteElements(state)
    workload.step(state, SilentPhases())
    assert not before.find_lost_numbers(state).nonfinite_count and bool(state.logits.isneginf().any())
    assert 0 < workload.error(setup)["logits_error"] < 0.05


def test_questions_about_a_users_model_are_completed_or_refused(user_model: str, fp8bench: Say, tmp_path: Path) -> None:
    shape = USER_MODEL_SHAPES[user_model]
    question = ServingQuestion(user_model, (Arm("fp32"), Arm("bf16", "fp8")), (), 1, True, 512)
    assert question.is_user_model and complete_serving_question(question).contexts == (128, 512, 513, 1024, 2048)
    assert complete_serving_question(replace(question, contexts=(64, 96, 128, 256))).contexts == (64, 96, 97, 128, 256)
    assert complete_serving_question(replace(question, contexts=(64, 97, 128, 256))).contexts == (64, 97, 128, 256)
    value = encode_answer(ServingAnswer(complete_serving_question(question), "cpu", (), 128, None))
    assert value["bytes"][1]["kv"] * 4 == value["bytes"][0]["kv"]
    assert step_bytes(shape, Arm("fp32"), 1, 8).kv == 4 * 2 * served_models.LAYERS * 8 * served_models.WIDTH
    support = workloads.get("decode").support
    params = {"size": user_model, "kv": "own", "weights": "own", "batch": 1, "context": 8}
    assert support(params, precisions.get("fp8"), CPU).level is Level.REFUSED
    assert support(params, precisions.get("served:weights=int4"), CPU).level is Level.NATIVE
    assert support({**params, "size": "a:b"}, precisions.get("bf16"), CPU).level is Level.REFUSED
    code, _, err = fp8bench("suite", "decode", "--set", f"size={MODELS}:llama", "--store", str(tmp_path))
    assert code == 2 and "Use `fp8bench infer" in err


@for_each("carrier", ["fp32", "bf16"])
def test_the_head_is_in_the_carrier(carrier: str, bench: Bench) -> None:
    """In the worker too: a bf16 head made the fp32 arm a seventh slower and gave it bf16's error."""
    params = dict(small("decode", "fp32").case.params)
    arms = f"served:carrier={carrier}:kv={carrier}", carrier
    setups = [bench._make_case_setup(case("decode", precisions.find_canonical_name(arm), params), CPU) for arm in arms]
    carried, served = (workloads.get("decode").error(setup)["logits_error"] for setup in setups)
    assert carried == served and setups[0].high.carrier is {"fp32": torch.float32, "bf16": torch.bfloat16}[carrier]


@for_each("name", ["int8", "int4", "fp8", "nvfp4"])
def test_a_product_with_a_kept_weight(name: str) -> None:
    gemm, precision = workloads.get("gemm"), f"served:weights={name}"
    setup = small("gemm", precision, m=5, n=32, k=64)
    errors = gemm.error(setup)
    limit = 0.02 if name == "int8" else 0.15
    assert 1e-3 < errors["product_error"] < limit and errors["kernel_error"] < 6e-3 < errors["product_error"]
    assert phases(gemm, setup) == (["gemm"] if name.startswith("int") else ["cast", "gemm"])
    support = gemm.support(dict(setup.case.params), precisions.get(precision), CPU)
    assert support.level is (Level.NATIVE if name.startswith("int") else Level.EMULATED)
    refused = {"product": "input-gradient"}, {"operands": "ready"}, {"k": 50}
    for more in refused if name == "int4" else refused[:2]:
        params = {**dict(setup.case.params), **more}
        assert gemm.support(params, precisions.get(precision), H200).level is Level.REFUSED


def decoded(context: int, precision: str, timing: Timing) -> Record:
    """A record of decoding at a context."""
    decoding = case("decode", precision, {"context": context})
    return Record(decoding, NATIVE, Status.OK, timing=timing, is_reference=precision == "fp32")


def test_a_figure_of_another_context_is_not_shown_for_the_longest() -> None:
    arms, contexts = (Arm("fp32"), Arm("bf16")), (128, 256, 512, 1024)
    records = [decoded(context, arm.carrier, steady(int(1e6), 24)) for context, arm in product(contexts, arms)]
    records[-1] = replace(records[-1], status=Status.FAILED, reason="out of memory", timing=None)
    question = ServingQuestion("nano", arms, contexts, 1, True, 512)
    times = tuple(collect_arm_times(question, arms, run_of(records), run_of([])))
    answer = ServingAnswer(question, "cpu", times, 128, None, bandwidth=1e9)
    lead, low = times
    assert answer.tpot(lead) == pytest.approx(1e-3) and answer.tpot(low) is None and len(low.tpot) == 3
    assert low.why == "at a context of 1024: out of memory"
    _, rows = table_rows(answer)
    assert "tpot_1024" in rows[0] and "tpot_1024" not in rows[1]


def test_an_interrupt_prints_what_was_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    arms, contexts = (Arm("fp32"), Arm("bf16")), (128, 256, 512, 1024, 2048)
    question = ServingQuestion("nano", arms, contexts, 1, True, 512)
    records = [decoded(context, arm.carrier, steady(int(1e6), 24)) for context, arm in product(contexts, arms)]

    def answered(run: Run) -> ServingAnswer:
        monkeypatch.setattr(job, "execute", Mock(side_effect=[run, KeyboardInterrupt]))
        return job._measure_arm_times(
            ServingAnswer(question, "cpu", (), 128, None), CPU, Path(), "", TERMINAL_JOB_OBSERVER
        )

    partial = answered(run_of(records))
    assert not partial.finished and len(partial.runs) == 1 and partial.question == question
    assert [time.crossing is None for time in partial.times] == [True, False] and partial.times[1].ttft is None
    few = answered(replace(run_of(records[:8]), finished=False))
    assert not few.finished and few.question.contexts == contexts[:4] and few.tpot(few.times[1]) is not None


def test_a_figure_lies_on_its_line() -> None:
    records, contexts = [], (128, 512, 1024, 2048)
    for context in contexts:
        seconds = 1e-3 + 2e-6 * context
        calls, waited = ((int(3e9 * seconds),),) * 4, 8 * seconds
        slots = (SlotSample(number, calls, 1.0, 1.0, waited_seconds=waited) for number in range(12))
        records.append(decoded(context, "fp32", Timing(Segments(("gemm",), (0,)), tuple(slots))))
    question = ServingQuestion("nano", (Arm("fp32"),), contexts, 1, True, 512)
    (times,) = collect_arm_times(question, [Arm("fp32")], run_of(records), run_of([]))
    assert times.line is not None
    for context, tpot in times.tpot:
        assert tpot == pytest.approx(times.line.a.point + times.line.b.point * context, rel=1e-6)
        assert tpot == pytest.approx(1e-3 + 2e-6 * context, rel=1e-3)
