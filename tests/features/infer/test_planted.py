"""Known mistakes of inference benchmarks, planted: each is refused, labelled or detected.

Mistakes of a cache (constant values, one position off, another layer's scale, all experts counted) are in
tests/nn/test_decoder.py and test_user_decoder.py, scales that are recomputed in each step in test_rollout.py, arms of
different length in test_infer.py.
"""

from __future__ import annotations

import sysconfig
from pathlib import Path

import pytest
import torch

from fp8bench.analysis.claims import label_false_claims
from fp8bench.errors import UsageError
from fp8bench.features.infer.job import HELD_OUT_MODULES, WINDOW_TOKENS, make_held_out_windows
from fp8bench.features.infer.quality import InferBench
from fp8bench.features.infer.values import QualityTask, ServedModel
from fp8bench.model import Label
from fp8bench.model.raw import Settings
from fp8bench.nn.served import USER_MODEL_SHAPES, ServedShape
from fp8bench.nn.served import ServedArm as Arm
from fp8bench.plan.corpus import Corpus
from fp8bench.protocols import SilentPhases
from fp8bench.registry import workloads
from fp8bench.worker.bench import Bench
from tests.counts import for_each
from tests.worker.test_tape_pass import records
from tests.workloads.steps import CPU, Operations, small

MODELS = "tests.nn.served_models"


@for_each(("name", "new"), [("decode", 1), ("prefill", 24)])
@for_each("size", ["nano", "nano-moe"])
def test_a_step_fills_no_cache_and_is_the_same_each_time(name: str, new: int, size: str) -> None:
    workload, setup = workloads.get(name), small(name, "bf16", size=size)
    state = workload.prepare(setup)
    place = state.at
    assert state.tokens.shape == (2, new) and place + new == setup.case.param("context")
    cache = []
    for pair in state.model.cache:
        cache += pair
    before = [heads.codes.clone() for heads in cache]
    assert place <= 2 or all(heads.read(place).float().std(2).min() > 0.1 for heads in cache)
    with Operations() as seen:
        workload.step(state, SilentPhases())
    assert not {"normal_", "randn", "uniform_", "random_"} & set(seen.names)
    first = state.logits.clone()
    workload.step(state, SilentPhases())
    assert torch.equal(first, state.logits) and state.at == place
    for old, heads in zip(before, cache, strict=True):
        assert torch.equal(old[:, :, :place], heads.codes[:, :, :place])
        assert not torch.equal(old[:, :, place:], heads.codes[:, :, place:])
    state.tokens.add_(1)
    workload.step(state, SilentPhases())
    assert not torch.equal(first, state.logits)


@for_each("maker", ["own", "remembers", "prefills"])
def test_a_model_that_cheats_is_labelled(
    maker: str, bench: Bench, corpus: Corpus, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = set[Label]() if maker == "own" else {Label.WORK_MISMATCH}
    name = f"{MODELS}:{maker}"
    monkeypatch.setitem(USER_MODEL_SHAPES, name, ServedShape(*InferBench(Settings()).read_shape(name, CPU, 0)))
    found = records(bench, corpus, "decode", "fp32", "bf16", size=name, context="32,60")
    assert len(found) == 4
    for record in found:
        assert {claim.label for claim in label_false_claims(record, None)} == expected, record.case.id


def test_windows_are_slices_of_the_encoded_text() -> None:
    folder = Path(sysconfig.get_paths()["stdlib"])
    whole = "".join((folder / name).read_text(encoding="utf-8", errors="replace") for name in HELD_OUT_MODULES)
    ids = whole.encode("ascii", errors="replace")
    windows = make_held_out_windows(2048)
    assert len(windows) == 16 and all(len(window) == WINDOW_TOKENS + 1 and bytes(window) in ids for window in windows)
    again = [bytes(window).decode().encode("utf-16") for window in windows]
    assert not any(window in ids for window in again)


@for_each("maker", ["of_another_vocabulary", "of_longer_texts"])
def test_tokens_outside_the_vocabulary_give_a_message(maker: str) -> None:
    task = QualityTask(ServedModel(f"{MODELS}:{maker}"), 512, (Arm("fp32"), Arm("bf16")), CPU, 0)
    with pytest.raises(UsageError, match="fewer positions or ids: choose shorter"):
        InferBench(Settings()).measure_quality(task)
