"""Memory and pace of a training on many GPUs: by hand, by what must not change, and against what is published."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as some

from fp8bench import units
from fp8bench.features.plan_parallel import formulas as memory_module
from fp8bench.features.plan_parallel.formulas import (
    STATE_BYTES,
    BytesPerWeight,
    Checkpointing,
    DecoderModel,
    ParallelLayout,
    StepLoad,
    Topology,
    predict_memory,
    predict_pace,
    tokens_per_second,
)
from fp8bench.features.plan_parallel.models import FP8_LM_MODELS
from fp8bench.features.plan_parallel.ranking import (
    MEMORY_ERROR,
    PUBLISHED_GPUS,
    PUBLISHED_MODELS,
    PUBLISHED_SEQUENCES,
    PUBLISHED_WEIGHTS,
    describe_unpublished_sizes,
)
from tests.counts import for_each
from tests.features.plan_parallel.published import GIB, TABLE, held, published

# Factors of one or two bytes, distinguishable from all other numbers in the sum.
SMALL = DecoderModel("small", vocabulary=1000, width=64, layers=4, heads=8, key_heads=2, hidden=192)
LINKS = Topology(node=4, memory=1e9, inside=1e6, between=1e5, bf16=1e9, fp8=2e9)
LOAD = StepLoad(sequence=32, local=8)


@for_each(("model", "weights"), [("llama3-8b", 8030261248), ("llama3-70b", 70553706496), ("llama3-405b", 405853388800)])
def test_weights_are_those_that_are_published(model: str, weights: int) -> None:
    assert PUBLISHED_MODELS[model].weights == weights


def test_every_published_figure_is_within_its_band() -> None:
    rows = held()
    assert not [figure for figure in rows if not figure.inside] and len(rows) == 20
    for row in (figure.row for figure in rows):
        plain = row.layout.tensor == row.layout.pipeline == row.layout.context == 1
        assert row.band == 0.05 or not plain


def test_what_is_said_of_published_trainings_is_what_they_say() -> None:
    rows = published()
    assert {name: DecoderModel(name, **fields) for name, fields in TABLE["model"].items()} == PUBLISHED_MODELS
    ends = (
        (PUBLISHED_GPUS, [row.layout.gpus for row in rows]),
        (PUBLISHED_WEIGHTS, [row.model.weights for row in rows]),
        (PUBLISHED_SEQUENCES, [row.load.sequence for row in rows]),
    )
    assert all((min(values), max(values)) == known for known, values in ends)
    assert units.percent(max(abs(figure.error) for figure in held())) == MEMORY_ERROR


def test_what_no_published_training_is_like_is_named() -> None:
    model = PUBLISHED_MODELS["llama3-8b"]
    assert (
        describe_unpublished_sizes(model, 8, 8192)
        == describe_unpublished_sizes(PUBLISHED_MODELS["llama3-405b"], 1024, 262144)
        == ()
    )
    assert describe_unpublished_sizes(model, 1 << 20, 8192) == ("1048576 GPUs (published: 8 to 1024)",)
    assert len(describe_unpublished_sizes(SMALL, 4, 128)) == 3


@for_each(
    ("changes", "rows"),
    [
        # States of 12 bytes a weight, as if gradients took none.
        (
            lambda patch: patch.setitem(
                STATE_BYTES, "fp32", BytesPerWeight(0, 4, 4, 4, weight_copy=2, resident_weight_copy=2)
            ),
            {"8B, 32k, FP8", "8B, 256k, FP8"},
        ),
        # An uncompiled loss, which distinguishes the rows of 2025.
        (
            lambda patch: patch.setattr(memory_module, "_FUSED_LOGIT_BYTES", 12),
            {"8B, FSDP 32, FP8, H200", "8B, FSDP 64, FP8, H200"},
        ),
    ],
)
def test_a_wrong_formula_leaves_a_band(
    changes: Callable[[pytest.MonkeyPatch], None], rows: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    changes(monkeypatch)
    assert {figure.row.name for figure in held() if not figure.inside} >= rows


def test_memory_equals_a_count_by_hand() -> None:
    block = 64 * 64 * 2 + 2 * 64 * 16 + 3 * 64 * 192 + 2 * 64
    assert SMALL.block == block and SMALL.weights == 4 * block + 2 * 64000 + 64
    alone, tokens = predict_memory(SMALL, ParallelLayout(), LOAD), 256
    assert alone.states == 16 * (4 * block + 2 * 64000) and alone.gathered == 2 * (4 * block + 2 * 64000)
    assert alone.kept == 4 * tokens * 2 * (8 * 64 + 2 * 16 + 4 * 192) and alone.logits == 12 * tokens * 1000
    load = replace(LOAD, micro_batches=2, checkpointing=Checkpointing.FULL)
    piped = predict_memory(SMALL, ParallelLayout(pipeline=2), load)
    assert piped.states == 16 * (2 * block + 64000) and piped.gathered == 6 * (2 * block + 64000)
    assert piped.kept == 2 * 2 * (tokens / 2) * 2 * 64


def test_pace_equals_a_count_by_hand() -> None:
    layout = ParallelLayout(copies=2, shards=2, tensor=2)
    found = predict_pace(SMALL, layout, LOAD, LINKS)
    tokens, stage = 256, (4 * SMALL.block + 2 * 64000) / 2
    blocks, halves, sends = 4, 2, 4
    gathers_and_sums = blocks * halves * sends * tokens * 64 * 2 / 2
    assert found.tensor == pytest.approx(gathers_and_sums / 1e6)  # half of each belongs to the other GPU
    assert found.shards == pytest.approx((2 + 2 + 4) * stage / 2 / 1e6)  # within a node of four
    assert found.copies == pytest.approx(2 * 4 * (stage / 2) / 2 / 1e5)  # across nodes
    assert found.bubble == 0 and found.context == 0
    assert found.step == found.working_seconds + found.exposed and found.exposed > 0
    assert tokens_per_second(layout, LOAD, found) == tokens / found.step / 2


@given(
    shards=some.sampled_from([1, 2, 4, 8]),
    tensor=some.sampled_from([1, 2]),
    pipeline=some.sampled_from([1, 2, 4]),
    level=some.sampled_from(list(Checkpointing)),
    count=some.sampled_from([1, 2, 4, 8]),
)
def test_formulas_obey_basic_laws(shards: int, tensor: int, pipeline: int, level: Checkpointing, count: int) -> None:
    layout, load = ParallelLayout(shards=shards, tensor=tensor, pipeline=pipeline), replace(LOAD, micro_batches=count)
    found = predict_memory(SMALL, layout, replace(load, checkpointing=level))
    assert (
        found.states * shards * tensor * pipeline
        >= LOAD.state_bytes.total * (SMALL.weights - SMALL.embedding_weights - 64) * 0.99
    )
    more = predict_memory(SMALL, replace(layout, shards=2 * shards), load)
    assert more.states == found.states / 2 and more.kept == predict_memory(SMALL, layout, load).kept
    paces = [
        predict_pace(SMALL, layout, replace(load, checkpointing=each_level), LINKS).products
        for each_level in Checkpointing
    ]
    kept_bytes = [
        predict_memory(SMALL, layout, replace(load, checkpointing=each_level)).kept for each_level in Checkpointing
    ]
    assert paces == sorted(paces) and kept_bytes == sorted(kept_bytes, reverse=True)
    narrow = predict_pace(SMALL, layout, replace(load, precision="fp8"), LINKS)
    assert narrow.step <= predict_pace(SMALL, layout, load, LINKS).step * (1 + 1e-9)


def test_fp8_lm_stores_the_published_bytes() -> None:
    """As published: 6 of 16 bytes a weight (arXiv 2310.18313); moments 62.5% less (MS-AMP's page on its levels)."""
    wide, narrow = STATE_BYTES["fp32"], STATE_BYTES["fp8-lm"]
    assert (wide.total, narrow.total) == (16, 6)
    assert (narrow.first_moment + narrow.second_moment) / (wide.first_moment + wide.second_moment) == 1 - 0.625
    narrow_load = replace(LOAD, precision="fp8", states="fp8-lm")
    for layout in (ParallelLayout(), ParallelLayout(shards=4), ParallelLayout(tensor=2, pipeline=2)):
        before, after = (predict_memory(SMALL, layout, load) for load in (LOAD, narrow_load))
        assert after.states == before.states * 6 / 16
        assert (after.kept, after.block, after.logits) == (before.kept, before.block, before.logits)


def test_copies_and_traffic_of_fp8_lm_equal_a_count_by_hand() -> None:
    """Weights are sent as one byte instead of two and stored in two orientations.

    Gradients are summed and sent as one byte instead of four.
    """
    load = replace(LOAD, precision="fp8", states="fp8-lm")
    assert predict_memory(SMALL, ParallelLayout(), load).gathered == 2 * (SMALL.weights - 64)
    stage = 2 * SMALL.block + SMALL.embedding_weights
    pipelined = predict_memory(SMALL, ParallelLayout(pipeline=2), replace(load, micro_batches=2))
    assert pipelined.gathered == (2 + 1) * stage
    sharded = predict_memory(SMALL, ParallelLayout(shards=4), load)
    assert sharded.gathered == 2 * 2 * SMALL.block + 2 * SMALL.embedding_weights + (2 + 1) * SMALL.block
    sent = predict_pace(SMALL, ParallelLayout(shards=4), load, LINKS).shards
    assert sent == pytest.approx((2 * 1 + 1) * (SMALL.weights - 64) * 3 / 4 / LINKS.inside)
    copied = predict_pace(SMALL, ParallelLayout(copies=4), load, LINKS).copies
    assert copied == pytest.approx(2 * 1 * (SMALL.weights - 64) * 3 / 4 / LINKS.inside)


def test_rlhf_keeps_four_models_of_which_two_are_trained() -> None:
    """One GPU: 16 bytes and a two-byte copy for each of two models, and two frozen copies.

    Sharded models are divided, and gathered for one model at a time.
    """
    load = replace(LOAD, rlhf=True)
    layout = ParallelLayout()
    plain, found = predict_memory(SMALL, layout, LOAD), predict_memory(SMALL, layout, load)
    weights = plain.states / 16
    assert found.critic == (16 + 2) * weights and found.frozen == 2 * 2 * weights
    assert found.total == plain.total + found.critic + found.frozen
    assert (plain.critic, plain.frozen) == (0, 0)
    cut = predict_memory(SMALL, ParallelLayout(shards=4), load)
    assert cut.critic == 16 * weights / 4 and cut.frozen == 2 * 2 * weights / 4
    narrow = predict_memory(SMALL, layout, replace(load, precision="fp8", states="fp8-lm"))
    assert (narrow.states + narrow.critic) / (found.states + found.critic) == (6 + 8) / (16 + 18)
    assert narrow.states / found.states == 1 - 0.625 and narrow.frozen / found.frozen == 0.5


def test_zero_one_equals_a_count_by_hand() -> None:
    """Each of four replicas stores all weights and gradients and a quarter of the rest.

    It sends gradients and receives weights.
    """
    layout, load = ParallelLayout(copies=4), replace(LOAD, zero_one=True)
    weights = SMALL.weights - 64
    found = predict_memory(SMALL, layout, load)
    assert (found.states, found.gathered) == ((4 + 12 / 4) * weights, 2 * weights)
    assert predict_pace(SMALL, layout, load, LINKS).copies == pytest.approx((4 + 2) * weights * 3 / 4 / LINKS.inside)
    narrow = replace(load, precision="fp8", states="fp8-lm")
    found = predict_memory(SMALL, layout, narrow)
    assert (found.states, found.gathered) == ((1 + 5 / 4) * weights, 2 * weights)
    assert predict_pace(SMALL, layout, narrow, LINKS).copies == pytest.approx((1 + 1) * weights * 3 / 4 / LINKS.inside)
    assert predict_memory(SMALL, ParallelLayout(), load) == predict_memory(SMALL, ParallelLayout(), LOAD)


@pytest.mark.parametrize(
    ("row", "share"),
    [*zip(TABLE["fp8_lm"], (0.32, 0.36, 0.43), strict=True)],
    ids=lambda value: value["model"] if isinstance(value, dict) else "",
)
def test_fp8_lm_saves_the_published_memory(row: dict[str, Any], share: float) -> None:
    """Within 9% of the published GiB.

    bf16 weights and fp32 gradients are complete in each replica, optimizer states are sharded. With FP8 weights in one
    orientation, or without sharding, the error exceeds 10%. As a share it is above the published one, because the
    formulas omit 6 to 13 GiB of both.
    """
    model = FP8_LM_MODELS[row["model"].lower()]
    assert (model.width, model.layers) == (row["width"], row["layers"])
    cut = row["layout"]
    layout = ParallelLayout(copies=cut["copies"], tensor=cut["tensor"], pipeline=cut["pipeline"])
    in_flight = 1 if cut["pipeline"] == 1 else 2 * cut["pipeline"]
    load = StepLoad(2048, row["local"][0] * in_flight, in_flight, compiled=False, zero_one=True)
    narrow = replace(load, precision="fp8", states="fp8-lm")
    before, after = predict_memory(model, layout, load), predict_memory(model, layout, narrow)
    published_saving, saved = row["memory"][0] - row["memory"][2], (before.total - after.total) / GIB
    assert saved == pytest.approx(published_saving, rel=0.09)
    assert 1 - after.total / before.total == pytest.approx(share, abs=0.005)
    assert share - 0.1 < 1 - row["memory"][2] / row["memory"][0] < share
    for memory, published_bytes in ((before, row["memory"][0]), (after, row["memory"][2])):
        assert 6 < published_bytes - memory.total / GIB < 13
    once = replace(STATE_BYTES["fp8-lm"], resident_weight_copy=1)
    with_one_copy = (
        saved + (STATE_BYTES["fp8-lm"].resident_weight_copy - once.resident_weight_copy) * before.gathered / 2 / GIB
    )
    assert abs(with_one_copy / published_saving - 1) > 0.1
    unsharded = [predict_memory(model, layout, replace(each, zero_one=False)).total for each in (load, narrow)]
    assert abs((unsharded[0] - unsharded[1]) / GIB / published_saving - 1) > 0.1
