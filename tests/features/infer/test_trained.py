"""`--from`: a checkpoint of a training as the model that quality is read on."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from fp8bench.errors import UsageError
from fp8bench.features.infer import job
from fp8bench.features.infer.job import find_trained_model
from fp8bench.features.infer.quality import compare_arms
from fp8bench.features.infer.values import QualityTask
from fp8bench.features.train.kind import KIND, load_training, load_training_header
from fp8bench.features.train.request import TrainerSettings, TrainingRequest
from fp8bench.features.train.run import train
from fp8bench.features.train.values import TrainingObserver, Validation
from fp8bench.nn.served import ServedArm as Arm
from tests.workloads.steps import CPU

SETTINGS = TrainerSettings(batch=2, sequence=64)


@pytest.mark.parametrize(
    "arch", [pytest.param("gpt", marks=pytest.mark.slow), pytest.param("moe", marks=pytest.mark.nightly)]
)
def test_a_checkpoint_is_served(arch: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its perplexity equals that of the training's validation at that step.

    The training has 12 steps, and its state before the ninth is stored. A missing checkpoint gives a message.
    """
    stored, served = tmp_path / "store", {"gpt": "nano", "moe": "nano-moe"}[arch]
    request = TrainingRequest(
        ("fp32", "bf16"),
        settings=replace(SETTINGS, arch=arch),
        steps=12,
        seeds=1,
        keep=8,
        evaluate=8,
        energy=False,
        isolation=False,
    )
    train(request, stored, TrainingObserver(), "fp8bench train")
    (path,) = KIND.files(stored)
    seen = {
        row.arm: row.loss
        for row in load_training(path).select_lines(Validation)
        if (row.of, row.step) == ("held-out", 8)
    }
    for word, arm in (("last", "fp32"), ("last:bf16", "bf16")):
        model, size = find_trained_model(word, stored, 3072)
        assert model.name.startswith(f"{arm} of training ") and model.name.endswith("step 8 of 12") and size == served
        span = load_training_header(path).text.held_out
        ids = np.memmap(span.path, np.uint16)[span.start : span.stop].tobytes()
        # The training's tokens unchanged, not text that was encoded a second time.
        assert all(len(text) == 65 and np.array(text, np.uint16).tobytes() in ids for text in model.text)
        quality = compare_arms(QualityTask(model, 0, (Arm("fp32"), Arm("bf16"), Arm("bf16", "fp8")), CPU, 0))
        assert not quality.caution and quality.itself.kl == 0 < quality.floor.kl < quality.arms[0].kl
        assert math.log(quality.perplexity) == pytest.approx(seen[arm], abs=0.1)
    random = compare_arms(QualityTask(replace(model, weights="", arm=""), 0, (Arm("fp32"), Arm("bf16")), CPU, 0))
    assert random.perplexity > 2 * quality.perplexity
    with pytest.raises(UsageError, match="has no arm 'fp9'"):
        find_trained_model("last:fp9", stored, 8192)
    moved = tmp_path / "bare" / "trainings" / path.parent.name
    moved.mkdir(parents=True)
    (moved / path.name).write_bytes(path.read_bytes())
    with pytest.raises(UsageError, match=r"no checkpoint: it was trained 12 steps.*--keep 6"):
        find_trained_model("last", tmp_path / "bare", 8192)
    head = load_training_header(path)
    for changed, words in (
        ({"arch": "mlp"}, "only gpt and moe can"),
        ({"arch": "cnn"}, "cannot be served with a cache"),
        ({"master": "fp16-scaled"}, "only fp32 can be read"),
        ({"parallel": "tp"}, "each rank has a part of the model"),
    ):
        settings, ranks = replace(SETTINGS, **changed), 2 if "parallel" in changed else None
        other = replace(head, request=replace(head.request, ranks=ranks, isolation=True, settings=settings))
        monkeypatch.setattr(job, "load_training_header", lambda path, other=other: other)
        with pytest.raises(UsageError, match=words):
            find_trained_model("last", stored, 8192)
