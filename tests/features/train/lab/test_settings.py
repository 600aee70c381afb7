"""Every schedule, optimizer and precision of a part: a lab that begins anew goes on to the same bits."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from fp8bench.features.train.lab.models import config_of, layers_of
from fp8bench.features.train.request import SCHEDULES
from fp8bench.features.train.values import LayerReading, StepFigure
from fp8bench.plan.corpus import Corpus
from tests.counts import for_each
from tests.features.train.lab.labs import lab_of, rows, task_of

AROUND = (("embed", "fp16"), ("norm", "fp8"), ("residual", "fp32"), ("logits", "mxfp8"), ("output", "fp16"))
WAYS: dict[str, dict[str, Any]] = {
    **{f"schedule {name}": {"schedule": name} for name in SCHEDULES},
    **{f"optimizer {name}": {"optimizer": name} for name in ("adamw", "sgd", "lion", "adafactor")},
    "lion in low precision": {"optimizer": "lion", "optimizer_states": "fp8lm", "master": "fp16-scaled"},
    "plateau that drops at once": {"schedule": "plateau", "patience": 0, "floor": 0.01, "rate": 1e-6},
    "updates in fp8": {"updates": "fp8", "optimizer": "sgd"},
    "clipping by kind": {"clip_by": "kind", "clip": 0.1},
    "clipping by tensor": {"clip_by": "tensor", "clip": 0.05},
    "rates": {"rates": (("attn", 0.5), ("blocks.0", 2.0))},
    "a scale that grows": {"loss_scale": "dynamic", "scale_first": 2.0**8, "scale_factor": 4.0, "scale_growth": 2},
    "parts in other precisions": {"precision_map": AROUND},
    "batch norm in fp16": {"arch": "cnn", "precision_map": (("norm", "fp16"),)},
    "batch norm in fp8": {"arch": "cnn", "precision_map": (("norm", "fp8"), ("embed", "mxfp4"))},
    "layer norm": {"arch": "cnn", "norm": "layer"},
}


# Ways that have nothing to do with each other are killed together; every one of them once.
TOGETHER = (
    ("schedule cosine", "optimizer adamw", "clipping by kind", "parts in other precisions"),
    ("schedule linear", "optimizer lion", "clipping by tensor"),
    ("schedule constant", "optimizer adafactor", "rates"),
    ("schedule wsd", "updates in fp8", "a scale that grows"),
    ("schedule one-cycle", "lion in low precision"),
    ("schedule inverse-sqrt", "optimizer sgd"),
    ("schedule plateau", "layer norm"),
    ("plateau that drops at once",), ("batch norm in fp16",), ("batch norm in fp8",),
)  # fmt: skip


def test_every_way_is_killed() -> None:
    assert sorted(way for ways in TOGETHER for way in ways) == sorted(WAYS)


@for_each("ways", TOGETHER, ids=lambda ways: ways[0])
def test_what_was_killed_goes_on_to_the_same_bits(ways: tuple[str, ...], corpus: Corpus, tmp_path: Path) -> None:
    settings = {name: value for way in ways for name, value in WAYS[way].items()}
    assert len(settings) == sum(len(WAYS[way]) for way in ways)
    task = task_of(corpus, "fp8-delayed", steps=20, **settings)
    whole = lab_of(task)
    _ = [whole.advance("fp8-delayed", 3), whole.validate("fp8-delayed")]
    whole.save(str(tmp_path / "kept"))
    other = lab_of(task)
    other.restore(str(tmp_path / "kept"))
    wanted, found = (
        [rows(lab.advance("fp8-delayed", 2)), lab.validate("fp8-delayed"), rows(lab.advance("fp8-delayed", 2))]
        for lab in (whole, other)
    )
    assert found == wanted


def test_stored_scales_stay_as_they_are_in_every_step_and_after_a_kill(corpus: Corpus, tmp_path: Path) -> None:
    """Of every layer but the head; another magnitude gives another training."""
    task = task_of(corpus, "fp8-delayed", "bf16")
    layers = [one.name for one in layers_of("gpt", config_of(task.settings, 256)) if not one.high]
    known = tuple(("fp8", layer, role, 2.0) for layer in layers for role in ("input", "weight", "gradient"))
    task = replace(task, settings=replace(task.settings, scales=known))
    whole, other = lab_of(task), lab_of(task)
    lines = [*whole.advance("fp8-delayed", 11)]
    scales = {(one.role, one.scale) for one in lines if isinstance(one, LayerReading) and one.layer in layers}
    assert scales == {("input", 224.0), ("weight", 224.0), ("gradient", 57344.0 / 2)}
    whole.save(str(tmp_path / "kept"))
    other.restore(str(tmp_path / "kept"))
    assert rows(other.advance("fp8-delayed", 2)) == rows(whole.advance("fp8-delayed", 2))
    plain = lab_of(task_of(corpus, "fp8-delayed", "bf16"))
    assert rows(plain.advance("fp8-delayed", 11)) != rows(lines)
    assert rows(plain.advance("bf16", 3)) == rows(whole.advance("bf16", 3))  # which has no such scales


def _losses(corpus: Corpus, **settings: Any) -> list[float]:
    lab = lab_of(task_of(corpus, "bf16", steps=6, **settings))
    found = []
    for _ in range(2):
        found += [row.loss for row in rows(lab.advance("bf16", 2))]
        if settings.get("schedule") == "plateau":
            lab.validate("bf16")
    return found


def test_each_of_them_changes_a_training(corpus: Corpus) -> None:
    """None is parsed and ignored, but for what is usual anyway."""
    usual = {arch: _losses(corpus, arch=arch) for arch in ("gpt", "cnn")}
    same = {"schedule cosine", "optimizer adamw", "a scale that grows"}  # powers of two change no bit of bf16's
    for way, settings in WAYS.items():
        found = _losses(corpus, **settings)
        assert (found == usual[settings.get("arch", "gpt")]) == (way in same), way


def test_clipping_by_group_is_told_as_a_share_of_all_gradients(corpus: Corpus) -> None:
    lab = lab_of(task_of(corpus, "bf16", steps=3, clip_by="tensor", clip=1e-3))
    trainer = lab._trainers["bf16"]
    list(trainer.advance(watched=False))
    gradients = trainer._optimizer.gradients.of(list(trainer._parameters.values()))
    own = [one.norm() for one in gradients]
    after = torch.stack([norm / max(1.0, float(norm) / 1e-3) for norm in own]).norm()
    (row,) = rows(lab.advance("bf16", 1))
    lab = lab_of(task_of(corpus, "bf16", steps=3, clip_by="tensor", clip=1e-3))
    (first,) = rows(lab.advance("bf16", 1))
    assert first.clipped == pytest.approx(1 - float(after) / first.gradient_norm, rel=1e-4)
    assert row.clipped > 0.9


def test_a_table_that_collapses_is_seen_as_the_model_sees_it(corpus: Corpus) -> None:
    """In four bits of which most are lost; the weights that are kept stay apart."""
    spread = {}
    for word in ("fp16", "custom:format=e2m1:scaling=none"):
        lab = lab_of(task_of(corpus, "bf16", steps=1, precision_map=(("embed", word),)))
        lines = lab.advance("bf16", 1)
        (spread[word],) = [one.value for one in lines if isinstance(one, StepFigure) and one.name == "embedding_spread"]
    assert spread["custom:format=e2m1:scaling=none"] == 0.0 < spread["fp16"]
