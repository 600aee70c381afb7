"""RLHF's four models in memory at once: their bytes by hand and by plan-parallel's formula, and what they compute."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from fp8bench.errors import UsageError
from fp8bench.model import Level, MemoryUse, StaticScales
from fp8bench.model.raw import Settings
from fp8bench.nn.rlhf import RlhfModels
from fp8bench.nn.sizes import SIZES, GPTConfig
from fp8bench.plan.corpus import Corpus
from fp8bench.protocols import Setup, SilentPhases
from fp8bench.registry import precisions, workloads
from fp8bench.worker.bench import Bench
from fp8bench.workloads.transformer import Transformer
from tests.facts import CPU
from tests.workloads.steps import setup_of

TINY = GPTConfig(256, 64, 2, 4, 4, 128, batch=2, sequence=16)


@pytest.fixture(autouse=True)
def _sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(SIZES, "tiny", TINY)
    monkeypatch.setitem(SIZES, "tiny-modern", replace(TINY, is_llama_like=True, key_heads=2))
    monkeypatch.setitem(SIZES, "tiny-tied", replace(TINY, tied=True))


def setup_for(corpus: Corpus, precision: str = "fp32", **changes: str) -> Setup:
    params = {"size": "tiny", "batch": 2, "sequence": 16, "micro_batches": 2, "data": corpus.identity, **changes}
    return setup_of("transformer", params, precision, 0, corpus.path)


def four_of(setup: Setup) -> RlhfModels:
    found = Transformer().prepare(setup)
    assert isinstance(found, RlhfModels)
    return found


def test_frozen_weights_in_fp8_by_hand(corpus: Corpus) -> None:
    four = four_of(setup_for(corpus, "bf16", models="rlhf", frozen="fp8"))
    rows = 2 * ((3 * 64 + 64) + (128 + 64))
    products = 2 * (64 * (3 * 64 + 64) + 2 * 64 * 128)
    others = 2 * (2 * 256 * 64 + 16 * 64 + 5 * 64)
    assert four.figures()["reference_bytes"] == products + 4 * rows + others == four.figures()["reward_bytes"]


def test_the_actor_trains_as_it_does_alone(corpus: Corpus) -> None:
    alone = Transformer().prepare(setup_for(corpus))
    four = four_of(setup_for(corpus, models="rlhf", frozen="fp32"))
    begun = [one.detach().clone() for one in four.critic.parameters]
    kept = four.frozen_models["reference"].embedding.clone()
    assert torch.equal(kept, four.actor.parameters[0])
    for _ in range(2):
        alone.step(SilentPhases())
        four.step(SilentPhases())
    pairs = zip(alone.parameters, four.actor.parameters, strict=True)  # type: ignore[union-attr]
    assert all(torch.equal(one, other) for one, other in pairs)
    assert not any(torch.equal(one, other) for one, other in zip(begun, four.critic.parameters, strict=True))
    assert torch.equal(four.frozen_models["reference"].embedding, kept) and not torch.equal(
        four.actor.parameters[0], kept
    )


def test_the_reference_scores_tokens_as_the_actor_began(corpus: Corpus) -> None:
    four = four_of(setup_for(corpus, models="rlhf", frozen="fp32"))
    four.loader.preload_batches(2)
    with torch.no_grad():
        wanted = [
            -four.actor.model(*batch, SilentPhases(), reduction="none") for batch in four.loader.read(SilentPhases())
        ]
    four.step(SilentPhases())
    assert all(torch.equal(one, other) for one, other in zip(four.scores["reference"], wanted, strict=True))
    assert not torch.equal(four.scores["reward"][0], four.scores["reference"][0])


@pytest.mark.slow
def test_all_four_lie_in_measured_memory(corpus: Corpus) -> None:
    """The peak exceeds the actor's alone by the other three's stored bytes, and at most by their temporary need."""
    alone = setup_for(corpus, "bf16")
    four = setup_for(corpus, "bf16", models="rlhf")
    bench = Bench(Settings(corpus=corpus.path))
    peaks = []
    for setup in (alone, four):
        use = bench.memory(setup.case, CPU)
        assert isinstance(use, MemoryUse) and sum(size for _, size in use.roles) == use.peak
        peaks.append(use.peak)
    state = four_of(four)
    state.step(SilentPhases())
    beside = sum(size for name, size in state.figures().items() if name != "actor_bytes")
    beside += sum(model.cache_bytes(TINY.sequence) for model in state.frozen_models.values())
    assert beside <= peaks[1] - peaks[0] < beside + 0.25 * peaks[0]


def test_what_cannot_be_is_a_sentence(corpus: Corpus) -> None:
    workload = workloads.get("transformer")
    params = dict(setup_for(corpus).case.params)
    for changes, why in (
        ({"frozen": "fp8"}, "add models=rlhf"),
        ({"models": "rlhf", "compile": "yes"}, "none is compiled: choose compile=no"),
        ({"models": "rlhf", "cut": "block"}, "none is compiled: choose compile=no, cut=linear"),
    ):
        with pytest.raises(UsageError, match=why):
            workload.expand({**params, **changes})
    four = {**params, "models": "rlhf"}
    assert "RLHF trains two models" in workload.scales_refused(four, StaticScales(4))
    assert workload.support({**four, "frozen": "fp8"}, precisions.get("bf16"), CPU).level is Level.EMULATED
    assert workload.support(four, precisions.get("bf16"), CPU).level is Level.NATIVE
    assert workload.work(four).flops == workload.work(params).flops * (2 + 2 / 3)
