"""All ways to divide a training, their order, and which kinds are worth it."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest

from fp8bench.features.plan_parallel.formulas import Checkpointing, StepLoad, Topology
from fp8bench.features.plan_parallel.ranking import (
    PUBLISHED_MODELS,
    USABLE_MEMORY_SHARE,
    LayoutRankingQuestion,
    WorthwhileAnswer,
    judge_parallelism,
    list_layouts,
    rank_layouts,
    rank_with_least_checkpointing,
)

H100 = Topology(8, 80 * 2**30, 450e9, 50e9, 660e12, 980e12)


def asked(model: str = "llama3-8b", gpus: int = 8, batch: int = 64, sequence: int = 8192) -> LayoutRankingQuestion:
    return LayoutRankingQuestion(PUBLISHED_MODELS[model], gpus, batch, StepLoad(sequence, 1), H100)


@pytest.mark.parametrize(("gpus", "batch"), [(1, 1), (8, 64), (12, 24), (32, 8), (64, 256)])
def test_every_split_is_listed_once(gpus: int, batch: int) -> None:
    question = asked(gpus=gpus, batch=batch)
    every = list(list_layouts(question))
    assert len(every) == len(set(every)) and all(layout.gpus == gpus for layout in every)
    cut = {(layout.tensor, layout.pipeline, layout.context) for layout in every}
    expected = {
        (tensor, pipeline, context)
        for tensor, pipeline, context in product(range(1, 9), range(1, 33), range(1, 3))
        if 8 % tensor == 0
        and gpus % (tensor * pipeline * context) == 0
        and (pipeline == 1 or -32 % pipeline <= 2)
        and batch % (gpus // (tensor * pipeline * context)) == 0
    }
    assert cut == expected


def test_stages_are_equally_long() -> None:
    assert {way.pipeline for way in list_layouts(asked(gpus=7, batch=56))} == {
        1
    }  # five layers in the longest of 7 stages
    assert {16, 32} <= {way.pipeline for way in list_layouts(asked("llama3-405b", 512, 512))}
    ways = {(way.pipeline, way.virtual) for way in list_layouts(asked("llama3-70b", 16, 128))}
    assert {(8, 1), (8, 2), (16, 1)} <= ways and (16, 2) not in ways  # 80 layers


def test_the_first_is_the_fastest_that_fits() -> None:
    plans = rank_layouts(asked())
    assert plans[0].fits and not plans[-1].fits
    fitting = [plan for plan in plans if plan.fits]
    assert plans[: len(fitting)] == tuple(fitting)
    assert all(plan.tokens <= 1.03 * plans[0].tokens for plan in fitting)
    assert all(plan.memory.total <= USABLE_MEMORY_SHARE * H100.memory for plan in fitting)
    assert all(plan.load.local * 8 // plan.layout.gpus_per_sequence == 64 for plan in plans)


def test_more_is_computed_again_only_where_nothing_fits_otherwise() -> None:
    """8B fits on eight GPUs without; 70B needs all of them and recomputing; 405B never fits."""
    levels = {}
    for model, gpus in (("llama3-8b", 8), ("llama3-70b", 24), ("llama3-405b", 8)):
        question, plans = rank_with_least_checkpointing(asked(model, gpus))
        levels[model] = question.load.checkpointing, plans[0].fits if plans else None
    assert levels["llama3-8b"] == (Checkpointing.NONE, True)
    assert levels["llama3-70b"][0] is not Checkpointing.NONE and levels["llama3-70b"][1] is True
    assert levels["llama3-405b"] == (Checkpointing.FULL, False)


def test_each_kind_of_model_gets_its_usual_split() -> None:
    """Small: DDP. 8B on a node: FSDP. 405B on many: TP and PP. Long sequences: CP.

    Experts only if the model has some.
    """

    def yes(question: LayoutRankingQuestion) -> set[str]:
        return {ruling.kind for ruling in judge_parallelism(question) if ruling.say is WorthwhileAnswer.YES}

    small = replace(asked(), model=replace(PUBLISHED_MODELS["llama3-8b"], layers=2, vocabulary=8192))
    assert yes(small) == {"DDP", "FSDP"}
    assert yes(asked()) == {"FSDP"}
    assert yes(asked("llama3-405b", 512, 512)) == {"TP", "PP"}
    assert "CP" in yes(asked(gpus=64, sequence=131072))
    # Too few sequences for one per GPU: TP and PP, which no ranking contradicts.
    assert yes(asked(batch=7)) == {"TP"} and yes(asked(gpus=64, batch=8)) == {"TP", "PP"}
    assert yes(asked(batch=12)) == set() and yes(asked(gpus=1, batch=1)) == set()
    # 64 heads and 80 layers divide neither by seven nor by 83.
    for gpus in (7, 83):
        question = asked("llama3-70b", gpus, batch=gpus - 1)
        assert yes(question) == set() and judge_parallelism(question)[2].why.endswith(
            f"{gpus} GPUs cannot divide this model evenly by it"
        )
    assert {ruling.why.split("; but ")[-1] for ruling in judge_parallelism(asked(batch=12))[:2]} == {
        "12 sequences cannot be divided evenly among 8 GPUs"
    }
