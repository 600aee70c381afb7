"""A lab's answers for its arms, and non-finite steps: where the first non-finite value was, and the chosen policy."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fp8bench.features.train.arms import MSAMP_LEVELS
from fp8bench.features.train.lab import rates
from fp8bench.features.train.lab.lab import Lab, NotFinite
from fp8bench.features.train.lab.watched_step import FaultyTensorFinder
from fp8bench.features.train.step import find_faulty_tensor
from fp8bench.features.train.values import FALLBACK_EVENT, Arm, ArmRole, StepFigure, StreamLine, TrainingEvent
from fp8bench.model.raw import Settings
from fp8bench.nn.arithmetics import PlainArithmetic
from fp8bench.nn.linear import Linear
from fp8bench.plan.corpus import Corpus
from fp8bench.precisions.recipes import Fp8
from fp8bench.protocols import SilentPhases
from fp8bench.registry import precisions
from tests.counts import for_each
from tests.facts import CPU
from tests.features.train.lab.labs import lab_of, rows, task_of

# With this loss scale gradients overflow fp16.
OVERFLOWING = "4294967296"


def losses(lab: Lab, arm: str, steps: int) -> list[float]:
    return [row.loss for row in rows(lab.advance(arm, steps))]


def test_arms_of_a_seed_are_paired(corpus: Corpus) -> None:
    """The repeat equals the reference bit for bit, however steps are interleaved."""
    arms = (Arm("bf16", "bf16", ArmRole.REFERENCE), Arm("again", "bf16", ArmRole.REPEAT))
    lab = lab_of(task_of(corpus, *arms, "fp32"))
    begun = losses(lab, "bf16", 2)
    fp32 = losses(lab, "fp32", 1)
    rest = losses(lab, "bf16", 1)
    assert losses(lab, "again", 3) == begun + rest
    assert fp32[0] == pytest.approx(begun[0], rel=5e-3) and fp32[0] != begun[0]


def test_products_in_another_precision_are_reported(corpus: Corpus, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are reported once, before the arm's first step; the numbers of a product show them."""
    assert not events(lab_of(task_of(corpus, "fp8")).advance("fp8", 2))
    monkeypatch.setattr(Fp8, "arithmetic", lambda self, facts: PlainArithmetic(torch.bfloat16))
    lines = lab_of(task_of(corpus, "fp8")).advance("fp8", 2)
    (event,) = events(lines)
    assert len(rows(lines)) == 2
    assert (event.kind, event.step) == (FALLBACK_EVENT, 0)
    assert event.words == "the numbers of a product are those of bfloat16, not of fp8"


def test_o3_of_ms_amp_trains_as_o2_does(corpus: Corpus) -> None:
    """Losses are equal bit for bit: casting a weight that is already FP8 under a power of two changes nothing."""
    arms = [Arm(name, level.precision, settings=level.settings) for name, level in MSAMP_LEVELS.items()]
    lab = lab_of(task_of(corpus, "bf16", *arms, batch=2))
    plain, o1, o2, o3 = (losses(lab, name, 6) for name in ("bf16", *MSAMP_LEVELS))
    assert o2 == o3 != o1 and o1 == pytest.approx(plain, rel=0.02)


def test_weights_one_ulp_apart_differ_as_rounding_does(corpus: Corpus) -> None:
    """The difference is small but not zero: equal bits would prove nothing."""
    lab = lab_of(task_of(corpus, "fp32", Arm("ulp", "fp32", ArmRole.CHAOS), batch=2))
    plain, ulp = (losses(lab, name, 12) for name in ("fp32", "ulp"))
    assert ulp != plain and ulp == pytest.approx(plain, rel=1e-4)


def test_an_arm_that_cannot_be_built_raises_when_it_is_used(corpus: Corpus, tmp_path: Path) -> None:
    lab = Lab(Settings())
    task = task_of(corpus, "bf16", Arm("odd", "bf16", settings=(("model", "vast"),)))
    (state,) = lab.begin(task)
    assert state.arm == "bf16" and len(lab.advance("bf16", 1)) > 0
    for ask in (lambda: lab.advance("odd", 1), lambda: lab.validate("odd")):
        with pytest.raises(RuntimeError, match="UnknownName: unknown model 'vast'"):
            ask()
    lab.drop("odd")
    assert lab.save(str(tmp_path / "kept")) == () and lab.restore(str(tmp_path / "kept")) == (("bf16", 1),)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:dynamo_pgo force disabled:UserWarning")  # torch's own
def test_a_compiled_arm_learns_what_an_eager_one_does(corpus: Corpus) -> None:
    """Forward and backward are one graph; validations use the model that is not compiled."""
    task = task_of(corpus, "bf16", Arm("compiled", "bf16", settings=(("compile", "yes"),)), micro_batches=2)
    lab = lab_of(task)
    assert losses(lab, "compiled", 4) == pytest.approx(losses(lab, "bf16", 4), rel=2e-3)
    assert lab.validate("compiled")[0].loss == pytest.approx(lab.validate("bf16")[0].loss, rel=2e-3)


def test_micro_batches_checkpointing_and_dropout(corpus: Corpus) -> None:
    """A recomputed block has the dropout that it had; two micro-batches are one batch of twice the size."""
    settings: tuple[dict[str, Any], ...] = (
        {"dropout": 0.5},
        {"dropout": 0.5, "checkpointing": "blocks"},
        {"batch": 4},
        {"batch": 2, "micro_batches": 2},
    )
    labs = [lab_of(task_of(corpus, "fp32", **own)) for own in settings]
    dropped, again, whole, halves = (losses(lab, "fp32", 3) for lab in labs)
    assert dropped == again and whole == pytest.approx(halves, rel=1e-5) and dropped[0] != halves[0]


def test_attention_in_the_arms_precision(corpus: Corpus) -> None:
    """Scores beyond fp16 are lost unless queries are scaled ahead."""
    for word in ("rounded", "prescaled"):
        lab = lab_of(task_of(corpus, "fp16", attention=word, on_nan="skip"))
        assert rows(lab.advance("fp16", 2))[0].loss < 7
        parameter = lab._trainers["fp16"].parameters["blocks.0.attn.qkv.weight"]
        parameter.detach()[:64].mul_(75)  # queries and keys: scores as large as 5,000 become 28 million
        assert rows(lab.advance("fp16", 1))[0].skipped is (word == "rounded")


def test_further_steps_repeat_the_last_ones(corpus: Corpus) -> None:
    """They are real steps, and change only that arm's weights."""
    lab = lab_of(task_of(corpus, "fp32", "bf16", steps=3))
    for arm in ("fp32", "bf16"):
        lab.advance(arm, 3)
    before = lab.validate("fp32"), lab.validate("bf16")
    assert lab.loop("fp32", 5) > 0 and lab.check("fp32").wrong == ""
    assert (lab.validate("fp32")[0].loss != before[0][0].loss) and lab.validate("bf16") == before[1]
    wild = lab_of(task_of(corpus, "fp16", steps=3, rate=10.0, loss_scale=OVERFLOWING))
    with pytest.raises(NotFinite):
        wild.loop("fp16", 3)
    assert wild.check("fp16").wrong.startswith("the arm has stopped")


def test_clipping_by_group_is_recorded_as_a_share_of_all_gradients(corpus: Corpus) -> None:
    labs = [lab_of(task_of(corpus, "bf16", steps=3, clip=clip)) for clip in (1e-3, "1e-3/tensor")]
    (whole,), (row,) = (rows(lab.advance("bf16", 1)) for lab in labs)
    assert whole.clipped == pytest.approx(1 - 1e-3 / row.gradient_norm, rel=1e-4)
    # Each tensor keeps a norm of at most 1e-3.
    count = len(labs[1]._trainers["bf16"].parameters)
    assert whole.clipped > row.clipped >= 1 - 1.001e-3 * count**0.5 / row.gradient_norm > 0.9


def test_a_table_that_collapses_is_seen_as_the_model_sees_it(corpus: Corpus) -> None:
    """In four bits the model sees rows that are all alike, while the stored weights differ."""
    spread = {}
    for word in ("fp16", "custom:format=e2m1:scaling=none"):
        lab = lab_of(task_of(corpus, "bf16", steps=1, precision_map=(("embed", word),)))
        figures = {line.name: line.value for line in lab.advance("bf16", 1) if isinstance(line, StepFigure)}
        spread[word] = figures["embedding_spread"]
    assert spread["custom:format=e2m1:scaling=none"] == 0.0 < spread["fp16"]


def weights_of(lab: Lab, arm: str) -> dict[str, Tensor]:
    return {name: weight.detach().clone() for name, weight in lab._trainers[arm].parameters.items()}


def spoil(lab: Lab, arm: str, name: str, factor: float) -> None:
    with torch.no_grad():
        lab._trainers[arm].parameters[name].mul_(factor)


def events(lines: tuple[StreamLine, ...]) -> list[TrainingEvent]:
    return [line for line in lines if isinstance(line, TrainingEvent)]


@for_each(
    ("arm", "name", "factor", "layer", "tensor"),
    [
        ("fp16", "blocks.0.mlp.up.weight", 7e4, "blocks.0.mlp.up", "output"),
        ("fp16", "blocks.0.mlp.down.weight", 1e7, "blocks.0.mlp.down", "weight after rounding"),
        ("bf16", "head.weight", float("nan"), "head.weight", "parameter"),
        ("fp16", "blocks.0.norm_mlp.weight", 1e5, "blocks.0.norm_mlp", "output"),
    ],
)
def test_the_first_tensor_that_is_not_finite_is_found(
    corpus: Corpus, arm: str, name: str, factor: float, layer: str, tensor: str
) -> None:
    lab = lab_of(task_of(corpus, arm))
    assert not events(lab.advance(arm, 2))
    spoil(lab, arm, name, factor)
    before = weights_of(lab, arm)
    lines = lab.advance(arm, 5)
    (row,) = rows(lines)
    (event, stopped) = events(lines)
    assert row.skipped and row.step == event.step == 2
    assert (event.kind, event.layer, event.tensor) == ("not-finite", layer, tensor), event.words
    assert dict(event.values)["direction"] == "forward" and stopped.kind == "stopped"
    assert ("its weights" in stopped.words) == (tensor == "parameter")
    for key, value in weights_of(lab, arm).items():
        assert torch.equal(value.nan_to_num(7), before[key].nan_to_num(7)), key
    assert lab.advance(arm, 1) == ()


def test_lower_rate_halves_the_rate_and_survives_a_checkpoint(corpus: Corpus) -> None:
    task = task_of(corpus, "fp16", on_nan="lower-rate", schedule="constant:warmup=0")
    lab = lab_of(task)
    trainer = lab._trainers["fp16"]
    trainer.loss_scale.scale = 2.0**32
    (row,), (_, lowered) = rows(lines := lab.advance("fp16", 1)), events(lines)
    trainer.loss_scale.scale = 1024.0
    resumed = lab_of(task)
    resumed._trainers["fp16"].set_state(trainer.get_state())
    after = [rows(some.advance("fp16", 1))[0] for some in (lab, resumed)]
    assert lowered.kind == "rate-lowered" and row.update_ratio == 0
    assert [step.rate for step in after] == [row.rate / 2] * 2 and after[0].update_ratio > 0


def test_overflowing_gradients_are_found_in_backward(corpus: Corpus) -> None:
    """The loss scale makes them overflow. Skipped steps change nothing, and twenty in a row end the arm."""
    lab = lab_of(task_of(corpus, "fp16", loss_scale=OVERFLOWING, on_nan="skip", steps=30))
    before = weights_of(lab, "fp16")
    lines = lab.advance("fp16", 30)
    first, *_, last = events(lines)
    values = dict(first.values)
    assert values["direction"] == "backward" and values["loss_scale"] == 2**32 and first.layer
    assert 0 < float(values["amax"]) <= 65504 * 2 and 0 < float(values["share"]) <= 1
    assert len(rows(lines)) == 20 and all(row.skipped for row in rows(lines))
    assert last.kind == "stopped" and "20 steps in a row" in last.words
    assert all(torch.equal(weight, before[name]) for name, weight in weights_of(lab, "fp16").items())


def test_a_dynamic_scale_comes_down_by_itself(corpus: Corpus, monkeypatch: pytest.MonkeyPatch) -> None:
    """No policy is applied, no step is repeated, and training goes on."""
    monkeypatch.setattr(rates, "GROWTH_STEPS", 3)
    lab = lab_of(task_of(corpus, "fp16", loss_scale="dynamic", steps=30))
    lab._trainers["fp16"].loss_scale.scale = 2.0**32
    lines = lab.advance("fp16", 30)
    assert {event.kind for event in events(lines)} == {"scale-halved"}
    skipped = [row.skipped for row in rows(lines)]
    first = skipped.index(False)
    assert 0 < first < 20 and rows(lines)[first].loss_scale == 2.0 ** (32 - first)
    assert rows(lines)[first + 3].loss_scale in (2.0 ** (33 - first), 2.0 ** (32 - first))


def test_an_arm_that_is_not_finite_is_not_kept(corpus: Corpus, tmp_path: Path) -> None:
    """The other arms are stored; after a restore this one has stopped."""
    task = task_of(corpus, "bf16", "fp8")
    lab = lab_of(task)
    spoil(lab, "fp8", "head.weight", float("inf"))
    assert lab.save(str(tmp_path / "kept")) == ("fp8",)
    again = lab_of(task)
    again.restore(str(tmp_path / "kept"))
    assert again.advance("fp8", 1) == () and len(rows(again.advance("bf16", 1))) == 1


def test_a_repeated_step_leaves_what_casts_remember(corpus: Corpus) -> None:
    """Even if every tensor is read."""
    lab = lab_of(task_of(corpus, "fp8-delayed:history=4", "nvfp4", rate=1e-30))
    for arm in ("fp8-delayed:history=4", "nvfp4"):
        trainer = lab._trainers[arm]
        before = trainer.copy_casts()
        lab.advance(arm, 1)
        after = trainer.copy_casts().arithmetics
        trainer.step = 0
        assert find_faulty_tensor(trainer, 1.0, before) is None
        again = trainer.copy_casts().arithmetics
        assert after.keys() == again.keys() and any(after.values())
        for name, kept in after.items():
            assert all(torch.equal(tensor, again[name][key]) for key, tensor in kept.items()), name


def test_a_faulty_tensor_has_the_scale_of_that_moment() -> None:
    """A delayed scale is reported unchanged; a current one is 1 for a tensor with infinities."""
    x = torch.full((32, 32), 2.0)
    lost = torch.full((32, 32), 2.0)
    lost[0, 0] = float("inf")
    for mode, scale in (("fp8", 1.0), ("fp8-delayed", 448 / 2)):
        layer = Linear(32, 32, precisions.get(mode).arithmetic(CPU).layer(mode))
        own = layer.arithmetic
        finder = FaultyTensorFinder()
        layer(x, SilentPhases())
        with finder.attach_hooks(nn.ModuleDict({"layer": layer})):
            layer(lost, SilentPhases())
        place = finder.faulty_tensor
        assert place is not None and (place.layer, place.tensor, place.direction) == ("layer", "input", "forward")
        assert (place.amax, place.share) == (2.0, 1 / 1024) and place.scale == pytest.approx(scale)
        assert "the input of layer, in forward: 0.098% of it is not finite" in place.description
        assert layer.arithmetic is own, "nothing stays attached"


def test_a_skipped_step_leaves_running_statistics(corpus: Corpus) -> None:
    lab = lab_of(task_of(corpus, "fp16", arch="cnn", on_nan="skip"))
    trainer = lab._trainers["fp16"]
    lab.advance("fp16", 1)
    spoil(lab, "fp16", "blocks.0.first.weight", 1e7)
    before = trainer.copy_casts().statistics
    lines = lab.advance("fp16", 1)
    assert rows(lines)[0].skipped and events(lines)[0].layer.startswith("blocks.0.first")
    after = trainer.copy_casts().statistics
    assert any("running" in name for name in before)
    assert all(torch.equal(tensor, after[name]) for name, tensor in before.items())
