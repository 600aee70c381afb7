"""Steps that are not finite: where they first were, and what is done about them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from fp8bench.features.train.lab.lab import Lab
from fp8bench.features.train.lab.watched_step import Finder
from fp8bench.features.train.values import StreamLine, TrainingEvent
from fp8bench.nn.linear import Linear
from fp8bench.plan.corpus import Corpus
from fp8bench.protocols import SilentPhases
from fp8bench.registry import precisions
from tests.facts import CPU
from tests.features.train.lab.labs import lab_of, rows, task_of

# Gradients of a loss that is multiplied by so much are beyond fp16.
OVERFLOWING = "4294967296"


def weights_of(lab: Lab, arm: str) -> dict[str, Tensor]:
    return {name: one.detach().clone() for name, one in lab._trainers[arm]._parameters.items()}


def spoil(lab: Lab, arm: str, name: str, factor: float) -> None:
    with torch.no_grad():
        lab._trainers[arm]._parameters[name].mul_(factor)


def events(lines: tuple[StreamLine, ...]) -> list[TrainingEvent]:
    return [one for one in lines if isinstance(one, TrainingEvent)]


@pytest.mark.parametrize(
    ("arm", "name", "factor", "layer", "tensor"),
    [
        ("fp16", "blocks.0.mlp.up.weight", 7e4, "blocks.0.mlp.up", "output"),
        ("fp16", "blocks.0.mlp.down.weight", 1e7, "blocks.0.mlp.down", "weight as it was rounded"),
        ("bf16", "head.weight", float("nan"), "head.weight", "parameter"),
        ("fp16", "blocks.0.norm_mlp.weight", 1e5, "blocks.0.norm_mlp", "output"),
    ],
)
def test_it_is_found_where_it_happened(
    corpus: Corpus, arm: str, name: str, factor: float, layer: str, tensor: str
) -> None:
    """In the step itself, with the layer and the tensor; the weights stay as they were."""
    lab = lab_of(task_of(corpus, arm))
    assert not events(lab.advance(arm, 2))
    spoil(lab, arm, name, factor)
    before = weights_of(lab, arm)
    lines = lab.advance(arm, 5)
    (row,), (found, stopped) = rows(lines), events(lines)
    assert row.skipped and row.step == found.step == 2
    assert (found.kind, found.layer, found.tensor) == ("not-finite", layer, tensor), found.words
    assert dict(found.values)["direction"] == "forward" and stopped.kind == "stopped"
    assert ("its weights" in stopped.words) == (tensor == "parameter")
    for key, value in weights_of(lab, arm).items():
        assert torch.equal(value.nan_to_num(7), before[key].nan_to_num(7)), key
    assert lab.advance(arm, 1) == ()


def test_gradients_that_overflow(corpus: Corpus) -> None:
    """Are found in backward, with the loss scale. Skipped steps change nothing, and after twenty of them it is over."""
    lab = lab_of(task_of(corpus, "fp16", loss_scale=OVERFLOWING, on_nan="skip", steps=30))
    before = weights_of(lab, "fp16")
    lines = lab.advance("fp16", 30)
    first, *_, last = events(lines)
    values = dict(first.values)
    assert values["direction"] == "backward" and values["loss_scale"] == 2**32 and first.layer
    assert 0 < float(values["amax"]) <= 65504 * 2 and 0 < float(values["share"]) <= 1
    assert len(rows(lines)) == 20 and all(row.skipped for row in rows(lines))
    assert last.kind == "stopped" and "20 steps in a row" in last.words
    assert all(torch.equal(one, before[name]) for name, one in weights_of(lab, "fp16").items())


def test_a_lower_rate(corpus: Corpus) -> None:
    """From the next step on, and steps after it change weights again."""
    lab = lab_of(task_of(corpus, "fp16", on_nan="lower-rate", warmup=0.0, floor=1.0))
    scale = lab._trainers["fp16"]._loss_scale
    scale.scale = 2.0**32
    (row,), (_, lowered) = rows(lines := lab.advance("fp16", 1)), events(lines)
    scale.scale = 1024.0
    after = rows(lab.advance("fp16", 1))[0]
    assert lowered.kind == "rate-lowered" and after.rate == row.rate / 2
    assert row.update_ratio == 0 < after.update_ratio


def test_a_dynamic_scale_comes_down_by_itself(corpus: Corpus) -> None:
    """It is what such a scale is for: no policy is asked, no step is done again, and training goes on."""
    lab = lab_of(task_of(corpus, "fp16", loss_scale="dynamic", scale_growth=3, steps=30))
    lab._trainers["fp16"]._loss_scale.scale = 2.0**32
    lines = lab.advance("fp16", 30)
    assert {one.kind for one in events(lines)} == {"scale-halved"}
    skipped = [row.skipped for row in rows(lines)]
    first = skipped.index(False)
    assert 0 < first < 20 and rows(lines)[first].loss_scale == 2.0 ** (32 - first)
    assert rows(lines)[first + 3].loss_scale in (2.0 ** (33 - first), 2.0 ** (32 - first))


def test_a_poisoned_arm_is_not_kept(corpus: Corpus, tmp_path: Path) -> None:
    """The others are; it has stopped when they go on from there."""
    task = task_of(corpus, "bf16", "fp8")
    lab = lab_of(task)
    spoil(lab, "fp8", "head.weight", float("inf"))
    assert lab.save(str(tmp_path / "kept")) == ("fp8",)
    again = lab_of(task)
    again.restore(str(tmp_path / "kept"))
    assert again.advance("fp8", 1) == () and len(rows(again.advance("bf16", 1))) == 1


def test_looking_changes_no_step(corpus: Corpus) -> None:
    """A step that was done once more, with everything looked at, leaves what casts remember as it was."""
    lab = lab_of(task_of(corpus, "fp8-delayed:history=4", "nvfp4", rate=1e-30))
    for arm in ("fp8-delayed:history=4", "nvfp4"):
        trainer = lab._trainers[arm]
        before = trainer._remembered()
        lab.advance(arm, 1)
        after = trainer._remembered().arithmetics
        trainer.step = 0
        assert trainer._place(1.0, before) is None
        again = trainer._remembered().arithmetics
        assert after.keys() == again.keys() and any(after.values())
        for name, kept in after.items():
            assert all(torch.equal(one, again[name][key]) for key, one in kept.items()), name


class Pair(nn.Module):
    """Two layers, the second of which gets whatever it is given."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = (
            Linear(32, 32, precisions.get(mode).arithmetic(CPU).layer(mode)) for mode in ("fp8", "fp8-delayed")
        )

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        silent = SilentPhases()
        return self.first(x, silent).sum() + self.second(y, silent).sum()


def test_the_scale_of_that_moment_is_told() -> None:
    """Of a delayed scale that which stood; a current one is 1 for a tensor with infinities."""
    x, lost = torch.full((32, 32), 2.0), torch.full((32, 32), 2.0)
    lost[0, 0] = float("inf")
    model = Pair()
    model(x, x)
    for pair, layer, scale in (((lost, x), "first", 1.0), ((x, lost), "second", 448 / 2)):
        finder = Finder()
        with finder.attached(model):
            model(*pair)
        place = finder.place
        assert place is not None and (place.layer, place.tensor, place.direction) == (layer, "input", "forward")
        assert (place.amax, place.share) == (2.0, 1 / 1024) and place.scale == pytest.approx(scale)
        assert f"the input of {layer}, in forward: 0.098% of it is not finite" in place.words
        assert type(model.first.arithmetic) is type(model.second.arithmetic), "nothing stays attached"


def test_what_batch_norms_keep_is_not_spoilt(corpus: Corpus) -> None:
    """A step that is skipped leaves running statistics as they were, though its forward pass was infinite."""
    lab = lab_of(task_of(corpus, "fp16", arch="cnn", on_nan="skip"))
    trainer = lab._trainers["fp16"]
    lab.advance("fp16", 1)
    spoil(lab, "fp16", "blocks.0.first.weight", 1e7)
    before = trainer._remembered().statistics
    lines = lab.advance("fp16", 1)
    assert rows(lines)[0].skipped and events(lines)[0].layer.startswith("blocks.0.first")
    after = trainer._remembered().statistics
    assert any("running" in name for name in before)
    assert all(torch.equal(one, after[name]) for name, one in before.items())
