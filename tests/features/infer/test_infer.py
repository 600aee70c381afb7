"""Words of arms, lines and crossings by simulation, quality on a trained model, and the shown answer."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fp8bench.errors import UsageError
from fp8bench.features.infer.fits import FittedLine, find_context_crossing, fit_line
from fp8bench.features.infer.job import SHIPPED, SHIPPED_WEIGHTS, WINDOW_TOKENS, add_reference, make_held_out_windows
from fp8bench.features.infer.quality import RANDOM_WEIGHTS, _make_decoder, _predict_tokens, compare_arms, read_weights
from fp8bench.features.infer.values import (
    ArmTimes,
    ContextCrossing,
    QualityTask,
    ServedModel,
    ServingAnswer,
    ServingQuality,
    ServingQuestion,
    arm_precision,
    format_arm,
    parse_arm,
)
from fp8bench.features.infer.view import encode_answer, render_page, table_rows
from fp8bench.model import DeviceFacts, Level
from fp8bench.nn.decoder import Decoder
from fp8bench.nn.served import OWN, check_served_support, list_weight_shapes
from fp8bench.nn.served import ServedArm as Arm
from fp8bench.nn.sizes import SERVED_SIZES
from fp8bench.registry import precisions, workloads
from fp8bench.report.terminal.layout import render
from tests.commands import Say
from tests.counts import for_each, sampled
from tests.facts import H200
from tests.workloads.steps import CPU

CONTEXTS, MODELS = (128, 512, 513, 1024, 2048), "tests.nn.served_models"


def test_names_of_arms_are_parsed_and_printed() -> None:
    for word in [
        "bf16",
        "kv=fp8",
        "weights=int8",
        "kv=nvfp4+weights=int4",
        "weights=fp8+activations=low",
        "carrier=fp32+kv=fp8",
    ]:
        arm = parse_arm(word)
        assert format_arm(arm) == word
        assert precisions.find_canonical_name(arm_precision(arm)) == arm_precision(arm)
    assert arm_precision(Arm("fp32", "fp8")) == "served:carrier=fp32:kv=fp8"
    for wrong in ("kv", "kv=fp9", "cache=fp8", "kv=fp8+", "kv=own", "kv=", "weights=int8@0=bf16", "fp8"):
        with pytest.raises(UsageError, match="is not an arm"):
            parse_arm(wrong)


@for_each(
    ("dtype", "level", "words"),
    [
        ("fp32", Level.NATIVE, ""),
        ("bf16", Level.NATIVE, ""),
        ("served:weights=int8", Level.NATIVE, "_weight_int8pack_mm"),
        ("served:weights=int4", Level.NATIVE, "_weight_int4pack_mm_for_cpu"),
        ("served:weights=int8:activations=low", Level.EMULATED, "decoded"),
        ("served:carrier=fp32:weights=int8", Level.EMULATED, "decoded"),
        ("served:kv=fp8", Level.EMULATED, "decoded"),
        ("served:kv=bf16", Level.NATIVE, ""),
        ("fp8", Level.EMULATED, ""),
        ("fp16", Level.REFUSED, "computes in"),
        ("tf32", Level.REFUSED, ""),
    ],
)
def test_arms_name_their_native_kernels(dtype: str, level: Level, words: str) -> None:
    support = check_served_support({"size": "nano", "kv": OWN, "weights": OWN}, precisions.get(dtype), CPU)
    assert support.level is level and words in support.reason
    both = {"size": "nano", "kv": "fp8", "weights": OWN}  # an axis and a dtype with the same meaning
    assert "choose them again" in check_served_support(both, precisions.get("served:kv=bf16"), CPU).reason
    assert check_served_support(both, precisions.get("fp32"), CPU).level is Level.EMULATED


def test_every_arm_does_the_same_work() -> None:
    workload = workloads.get("decode")
    work = workload.work({"size": "llama3-8b", "batch": 3, "context": 8192})
    assert work.tokens == 3
    weights = 32 * 218_103_808 + 128256 * 4096
    assert work.flops == 2 * 3 * weights + 4 * 3 * 32 * 4096 * 8192
    with pytest.raises(UsageError, match="too long"):
        workload.expand({"size": "gpt2", "batch": 1, "context": 1025, "kv": OWN, "weights": OWN})


def noisy(random: np.random.Generator, rounds: int, spread: float) -> np.ndarray:
    """Noise that mostly adds."""
    return abs(random.normal(0, spread / 2, rounds)) + random.lognormal(0, spread, rounds)


def swept(seed: int, rounds: int, spread: float, a: float, b: float) -> dict[int, tuple[float, ...]]:
    random = np.random.default_rng(seed)
    return {context: tuple(((a + b * context) * noisy(random, rounds, spread)).tolist()) for context in CONTEXTS}


def fitted(seed: int, rounds: int, spread: float, a: float, b: float) -> FittedLine:
    line = fit_line(swept(seed, rounds, spread, a, b))
    assert line is not None
    return line


@pytest.mark.parametrize(
    ("rounds", "spread", "sweeps", "least"),
    [
        (10, 0.02, 20, 0.9),
        pytest.param(10, 0.01, 200, 0.95, marks=pytest.mark.slow),
        *sampled([], [(10, 0.05, 200, 0.95), (24, 0.01, 200, 0.95), (24, 0.05, 200, 0.95)]),
    ],
)
def test_intervals_hold_the_truth(rounds: int, spread: float, sweeps: int, least: float) -> None:
    fast = np.sort(noisy(np.random.default_rng(99), 400_000, spread))[:100_000].mean()
    held = np.zeros(3)
    for sweep in range(sweeps):
        line, other = fitted(2 * sweep, rounds, spread, 1e-3, 6e-7), fitted(2 * sweep + 1, rounds, spread, 8e-4, 8.5e-7)
        crossing = find_context_crossing(other, line, CONTEXTS)
        for place, (interval, true) in enumerate(((line.line.a, 1e-3), (line.line.b, 6e-7))):
            held[place] += interval.low <= true * fast <= interval.high
        held[2] += crossing.at is None or crossing.low <= 800 <= crossing.high
    assert (held / sweeps).min() >= least


def test_a_crossing_is_claimed_of_no_curve() -> None:
    """Times that jump between two contexts do not fit a line.

    Nothing is faster where lines would cross: there is no 'pays up to', or its interval holds the jump.
    """
    for seed in range(20):
        straight = swept(2 * seed, 24, 0.01, 1e-3, 6e-7)
        curved = swept(2 * seed + 1, 24, 0.01, 9.9e-4, 6e-7)
        leaps = {context: np.multiply(1 + 0.3 * (context > 1024), times) for context, times in curved.items()}
        crossing = find_context_crossing(
            *(line for line in map(fit_line, (leaps, straight)) if line is not None), CONTEXTS
        )
        assert crossing.at is None or crossing.low <= 1024 < crossing.high, seed


def paged(page: int, a: float, b: float, contexts: tuple[int, ...], seed: int) -> FittedLine:
    """An arm that reads whole pages, with 1% noise."""
    random = np.random.default_rng(seed)
    rounds = {}
    for context in contexts:
        rounds[context] = ((a + b * -(-context // page) * page) * noisy(random, 24, 0.01)).tolist()
    line = fit_line(rounds)
    assert line is not None
    return line


@for_each("contexts", [CONTEXTS, (256, 512, 768, 1024, 1280, 1536, 2048)])
def test_an_arm_that_reads_whole_pages_crosses_within_its_interval(contexts: tuple[int, ...]) -> None:
    told = 0
    for seed, page in enumerate((1, 64, 256, 1024)):
        reference = paged(1, 1e-3, 1e-6, contexts, 2 * seed)
        for at in (300, 700, 812, 1200):
            a = 1e-3 + 6e-7 * at
            crossing = find_context_crossing(paged(page, a, 4e-7, contexts, 2 * seed + 1), reference, contexts)
            every = np.arange(contexts[0], contexts[-1] + 1)
            slower = every[a + 4e-7 * -(-every // page) * page >= 1e-3 + 1e-6 * every]
            first = every[len(slower[slower <= at])] if page == 1 else every[~np.isin(every, slower)][0]
            told += crossing.at is not None
            if crossing.at is not None:
                assert crossing.low <= first <= crossing.high + 1 and slower[-1] <= crossing.high + 1, (page, at)
    assert told > 3


def test_measured_contexts_override_the_fitted_lines() -> None:
    contexts = (128, 257, 512, 769, 1024, 1281, 1536, 1793, 2048, 4096)
    reference = paged(1, 1e-3, 1e-6, contexts, 0)
    slow_at = dict.fromkeys(contexts, 1.0) | {1281: 1.3}
    random = np.random.default_rng(1)
    rounds = {c: ((1.25e-3 + 5e-7 * c) * slow_at[c] * noisy(random, 24, 0.01)).tolist() for c in contexts}
    line = fit_line(rounds)
    assert line is not None
    steady = replace(line, line_excess_seconds=np.zeros(len(contexts)))  # as if the lines fitted exactly
    crossing = find_context_crossing(steady, replace(reference, line_excess_seconds=np.zeros(len(contexts))), contexts)
    assert crossing.contrary == (1281,) and crossing.high == 1281 and crossing.at is not None
    question = ServingQuestion("nano", (Arm("fp32"), Arm("bf16")), contexts, 1, True, 1024)
    times = ArmTimes(Arm("fp32"), line=reference.line), ArmTimes(Arm("bf16"), line=line.line, crossing=crossing)
    text = render(render_page(ServingAnswer(question, "cpu", times, 128, None)), 200, False, False)
    assert re.search("bf16 +pays from a context of", text) and "measured slower at 1281" in text


def test_crossings_are_printed_if_they_exist() -> None:
    reference = fitted(1, 24, 0.01, 1e-3, 6e-7)
    sooner = find_context_crossing(fitted(2, 24, 0.01, 8e-4, 8.5e-7), reference, CONTEXTS)
    later = find_context_crossing(fitted(3, 24, 0.01, 1.2e-3, 3.5e-7), reference, CONTEXTS)
    for crossing, ends in ((sooner, (True, False)), (later, (False, True))):
        assert crossing.faster == ends and crossing.at is not None
        assert crossing.low < 800 < crossing.high and crossing.high < 2 * crossing.low
    slower = find_context_crossing(fitted(4, 24, 0.01, 1.2e-3, 9e-7), reference, CONTEXTS)
    assert slower.at is None and slower.faster == (False, False)
    for seed, a, b in ((5, 1e-3, 6e-7), (6, 2e-3, 5e-7)):  # also at 10,000, beyond the measured contexts
        assert find_context_crossing(fitted(seed, 24, 0.01, a, b), reference, CONTEXTS).at is None
    assert fit_line(dict.fromkeys(CONTEXTS[:3], (1e-3,) * 10)) is None


ARMS = tuple(
    parse_arm(word) for word in ("fp32", "bf16", "kv=fp8", "kv=fp8-token", "kv=nvfp4", "weights=int8", "weights=int4")
)


def quality(
    text: tuple[tuple[int, ...], ...], weights: str = str(SHIPPED_WEIGHTS), arms: tuple[Arm, ...] = ARMS
) -> ServingQuality:
    model = ServedModel(SHIPPED, SERVED_SIZES[SHIPPED], weights, text=text)
    return compare_arms(QualityTask(model, 0, arms, CPU, 0))


@pytest.fixture(scope="module")
def found() -> ServingQuality:
    return quality(make_held_out_windows(1024))


def test_the_shipped_model_is_trained_and_its_text_held_out(found: ServingQuality) -> None:
    """Random weights have a perplexity of 128; swapped weights are noticed at once."""
    assert not found.caution and found.perplexity < 7
    weights, config = read_weights(SHIPPED_WEIGHTS, SERVED_SIZES[SHIPPED], "cpu"), SERVED_SIZES[SHIPPED]
    size = 2 * sum(weights(name).numel() for name in list_weight_shapes(config))
    assert size == SHIPPED_WEIGHTS.stat().st_size < 400_000
    random = quality(make_held_out_windows(256), "", ARMS[:2])
    assert random.caution == RANDOM_WEIGHTS and random.perplexity > 100


def test_quality_has_a_zero_a_floor_and_an_order(found: ServingQuality) -> None:
    assert found.itself.kl == found.itself.kl_tail == 0 and found.itself.same_top == 1
    assert 0 < found.floor.kl < 1e-9
    bf16, fp8, fp8_token, nvfp4, int8, int4 = found.arms
    assert found.floor.kl < bf16.kl < int8.kl < int4.kl and bf16.kl < fp8_token.kl < fp8.kl * 1.05 < nvfp4.kl
    assert all(arm.log_perplexity.low <= arm.log_perplexity.high for arm in found.arms)
    assert bf16.bits == 16.0 and int8.bits < 9.5 and int4.bits < 6


def test_kl_is_that_of_the_definition(found: ServingQuality) -> None:
    text = make_held_out_windows(256)[:1]
    own = quality(text, arms=ARMS[:2])
    config = replace(SERVED_SIZES[SHIPPED], sequence=WINDOW_TOKENS)
    weight = read_weights(SHIPPED_WEIGHTS, config, "cpu")
    served = (_make_decoder(config, weight, arm, (1, WINDOW_TOKENS)) for arm in ARMS[:2])
    with torch.no_grad():
        p, q = (_predict_tokens(model, torch.tensor(text)).logs[0].exp().numpy() for model in served)
    total = sum(p[place] * np.log(p[place] / q[place]) for place in np.ndindex(WINDOW_TOKENS, 128) if p[place] > 0)
    assert own.arms[0].kl == pytest.approx(total / WINDOW_TOKENS, rel=1e-6)


def test_arms_of_another_length_are_not_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted: the low arm sees only the last token, which would be compared with each of the reference's."""
    forward = Decoder.forward

    def shortened(model: Decoder, *words: Any, **more: Any) -> torch.Tensor:
        logits = forward(model, *words, **more)
        return logits if logits.dtype is torch.float32 else logits[:, -1:]

    monkeypatch.setattr(Decoder, "forward", shortened)
    with pytest.raises(RuntimeError, match="Size does not match"):
        quality(make_held_out_windows(256), arms=ARMS[:2])


def test_values_that_are_not_numbers_are_reported(found: ServingQuality) -> None:
    bad = replace(found.arms[1], kl=math.nan, kl_tail=math.inf)
    arms = Arm("fp32"), Arm("bf16"), Arm("bf16", "fp8"), Arm("fp32", "fp8")
    some = replace(found, arms=(found.arms[0], bad, found.arms[0]))
    question = ServingQuestion("nano", arms, CONTEXTS, 1, True, 1024)
    answer = ServingAnswer(question, "cpu", tuple(map(ArmTimes, arms)), 128, some)
    text = render(render_page(answer, everything=True), 200, False, False)
    assert re.search(r"kv=fp8 .*\bnan +inf\b", text) and "carrier=fp32+kv=fp8" in text


def test_the_answer_fits_on_sixteen_lines_and_names_what_matters(found: ServingQuality) -> None:
    arms = (Arm("fp32"), Arm("bf16"), Arm("bf16", "fp8"), Arm("bf16", "", "int8"), Arm("bf16", "fp8", "int8"))
    question = ServingQuestion("nano", arms, CONTEXTS, 1, True, 1024)
    lines = [fitted(1, 24, 0.01, 1e-3, 6e-7), fitted(2, 24, 0.01, 1.2e-3, 9e-7), fitted(3, 24, 0.01, 8e-4, 8.5e-7)]

    def times(arm: Arm, line: FittedLine) -> ArmTimes:
        tpot = tuple((context, float(line.at(np.array([context])).mean())) for context in CONTEXTS)
        crossing = None if arm is arms[0] else find_context_crossing(line, lines[0], CONTEXTS)
        return ArmTimes(arm, tpot, line.line, crossing, 0.01, kernel="torch's own products")

    timed = tuple(times(arm, line) for arm, line in zip((arms[0], arms[1], arms[3]), lines, strict=True))
    timed += tuple(ArmTimes(arm, why="keys and values in fp8 are restored") for arm in (arms[2], arms[4]))
    some = replace(found, arms=tuple(found.arms[place] for place in (0, 1, 4, 1)))
    answer = ServingAnswer(question, "cpu", timed, 128, some, bandwidth=1e9, runs=("12345678", "9abcdef0"))
    text = render(render_page(answer), 100, False, False)
    assert len(text.splitlines()) <= 16, text
    assert re.search(r"weights=int8 +pays up to a context of", text) and re.search("bf16 +slower +", text)
    assert re.search(r"kv=fp8 +speed unknown +at most \S+x by its bytes\s+same next token", text) and "KL" not in text
    everything = render(render_page(answer, everything=True), 100, False, False)
    assert "(floor)" in everything and "KL" in everything
    assert "cached" in everything  # no read is faster than possible
    doubted = replace(answer, times=tuple(replace(time, doubts=("contended",)) for time in answer.times))
    doubted_text = render(render_page(doubted), 200, False, False)
    assert "pays up to" not in doubted_text and re.search(
        "weights=int8 +cannot tell .*times cross at", doubted_text, re.DOTALL
    )
    assert "contended" not in doubted_text
    unsure = ContextCrossing(None, CONTEXTS[0], CONTEXTS[-1], (None, False))
    half_known = replace(answer, times=tuple(replace(time, crossing=unsure) for time in answer.times))
    half_known_text = render(render_page(half_known), 200, False, False)
    assert re.search(
        rf"bf16 +slower at {CONTEXTS[-1]} tokens .*\n +unclear at {CONTEXTS[0]} tokens", half_known_text
    ), half_known_text
    names, rows = table_rows(answer)
    assert len(rows) == 5 and set(names) >= {"arm", "a", "b_low", "break_even", "kl", "kv_bytes"}
    assert len(encode_answer(answer)["bytes"]) == 5


@for_each(("facts", "reference", "first"), [(CPU, None, "fp32"), (H200, None, "bf16"), (H200, "fp32", "fp32")])
def test_the_reference_is_the_usual_precision_of_the_device(
    facts: DeviceFacts, reference: str | None, first: str
) -> None:
    question = ServingQuestion("nano", (Arm("bf16"), Arm("bf16", "fp8")), CONTEXTS, 1, True, 1024)
    arms = add_reference(question, facts, reference).arms
    assert arms[0] == Arm(first) and len(arms) == (2 if first == "bf16" else 3)


@for_each(
    ("words", "message"),
    [
        ("--size gpt2 --contexts 128,256,512,2048", "has positions for 1 to 1024"),
        ("--contexts 128,256", "a line needs 4"),
        ("--contexts a,b,c,d", "not a list of whole numbers"),
        ("--size nan", "cannot be served"),
        ("--arms kv=fp9", "is not an arm"),
        ("--size llama3-8b --batch 128 --contexts 1,2,3,131072", "Choose a smaller batch"),
        ("--size mixtral-8x7b --reference fp32 --quick", "takes 174 GiB"),
        (f"{MODELS}:own --size nano", "Leave --size and --from out"),
        (MODELS, "is not a function"),
        ("--from last", "no training 'last'"),
    ],
)
def test_bad_arguments_are_refused(words: str, message: str, fp8bench: Say, tmp_path: Path) -> None:
    code, out, err = fp8bench("infer", *words.split(), "--store", str(tmp_path))
    assert code == 2 and not out and message in err and not list(tmp_path.iterdir()), err
