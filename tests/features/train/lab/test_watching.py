"""A watched training: the same numbers as one that nobody watches, and lines that say what was there."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from fp8bench.features.train.lab.lab import Lab
from fp8bench.features.train.lab.readings import attention_score, batch_norm_drift, embedding_spread
from fp8bench.features.train.lab.watched_step import GradientNoise, ModelWatch, noise_of
from fp8bench.features.train.values import Arm, LayerReading, StepFigure, StepRow, StreamLine
from fp8bench.features.train.verdicts.histories import scales_of
from fp8bench.formats.grids import E4M3, E5M2
from fp8bench.formats.recipes import Delayed
from fp8bench.nn.attention import SelfAttention
from fp8bench.plan.corpus import Corpus
from fp8bench.protocols import Role, WatchedArithmetic
from tests.counts import for_each
from tests.features.train.lab.labs import hooks_of, lab_of, restarted, rows, task_of

ARMS = (
    Arm("delayed", "fp8-delayed:history=3", settings=(("checkpointing", "blocks"), ("dropout", 0.1))),
    Arm("nvfp4", "nvfp4", settings=(("micro_batches", 2),)),
    Arm("fp16", "fp16", settings=(("loss_scale", "dynamic"),)),
    Arm("cnn", "mxfp8", settings=(("arch", "cnn"), ("sequence", 32))),
    Arm("moe", "bf16", settings=(("arch", "moe"),)),
)
LAYERS = ("blocks.0.attn.qkv", "blocks.0.attn.out", "blocks.0.mlp.up", "blocks.0.mlp.down", "head")


def advanced(lab: Lab, steps: int) -> list[StreamLine]:
    return [line for arm in ARMS for line in lab.advance(arm.name, steps)]


@pytest.fixture(scope="module")
def lines(corpus: Corpus) -> list[StreamLine]:
    """Of a training that is watched in every second step."""
    return advanced(lab_of(replace(task_of(corpus, *ARMS, steps=5), stride=2)), 5)


def test_nobody_sees_in_the_losses_that_it_is_watched(lines: list[StreamLine], corpus: Corpus) -> None:
    """Not a bit: with delayed scales, stochastic rounding, dropout, blocks that are computed again, a loss scale."""
    unwatched = rows(advanced(lab_of(replace(task_of(corpus, *ARMS, steps=5), stride=1000)), 5))
    assert list(map(repr, rows(lines))) == list(map(repr, unwatched)) and len(unwatched) == 25  # a NaN is its like
    assert all((row.seconds == 0) == (row.step % 2 == 0) for row in lines if isinstance(row, StepRow))


def test_every_layer_says_what_it_casts(lines: list[StreamLine]) -> None:
    """Once for each role, in watched steps, whatever the micro-batches and how often a block is computed."""
    keys = [(line.arm, line.step, line.layer, line.role) for line in lines if isinstance(line, LayerReading)]
    assert len(set(keys)) == len(keys) and {step for _, step, _, _ in keys} == {0, 2, 4}
    products = {(layer, role.value) for layer in LAYERS for role in Role}
    for arm in ("delayed", "nvfp4", "fp16"):
        assert {key[2:] for key in keys if key[0] == arm} == {
            *products, ("embedding", "weight"), ("positions", "weight"),
        }  # fmt: skip
    assert ("cnn", 0, "blocks.0.first", "gradient") in keys
    assert ("moe", 0, "blocks.0.mlp.experts.7.up", "input") in keys


def test_scales_are_those_of_the_casts(lines: list[StreamLine]) -> None:
    """The first delayed ones are 1; those of blocks differ; bf16 has none."""
    found = {(line.arm, line.step, line.layer, line.role): line for line in lines if isinstance(line, LayerReading)}
    first, next_, later = (found["delayed", step, "blocks.0.mlp.up", "input"] for step in (0, 2, 4))
    assert first.scale == 1 and first.drift is None and later.scale > 10
    assert next_.drift == pytest.approx(math.log2(next_.scale))
    blocks, plain = found["nvfp4", 4, "blocks.0.mlp.up", "input"], found["moe", 4, "head", "input"]
    assert 0 < blocks.least_scale < blocks.scale < blocks.largest_scale
    assert blocks.signal_to_noise is not None and 15 < blocks.signal_to_noise < 30
    assert plain.scale == 1 and plain.signal_to_noise is None
    gradient = found["fp16", 4, "head", "gradient"]
    assert gradient.lag is not None and -20 < gradient.lag < 0, "with the loss scale in it"


def test_amaxes_of_every_step_replayed_give_the_scales_that_there_were(corpus: Corpus) -> None:
    """Bit for bit, of every tensor: what is read is what delayed scaling saw."""
    delayed = Delayed(history=3, margin=1, interval=2)
    arm = Arm("delayed", "fp8-delayed:history=3:margin=1:interval=2")
    lab = lab_of(replace(task_of(corpus, arm, steps=6), stride=1))
    found: dict[tuple[str, str], list[LayerReading]] = {}
    for line in lab.advance("delayed", 6):
        if isinstance(line, LayerReading) and line.layer.startswith("blocks"):
            found.setdefault((line.layer, line.role), []).append(line)
    assert len(found) == 12
    for (_, role), course in found.items():
        largest = (E5M2 if role == "gradient" else E4M3).largest
        wanted = scales_of([one.amax for one in course], delayed, largest)
        assert [one.scale for one in course] == wanted.tolist()


def test_what_else_a_watched_step_says(lines: list[StreamLine]) -> None:
    found = {
        (one.arm, one.name, one.layer): one.value for one in lines if isinstance(one, StepFigure) and one.step == 4
    }
    for layer in LAYERS:
        assert 0 < found["nvfp4", "update_ratio", layer] < 0.1
        assert found["nvfp4", "output_amax", layer] > 0 and found["nvfp4", "gradient_snr", f"{layer}.weight"] >= 0
    assert found["nvfp4", "gradient_snr", ""] >= 0 and found["nvfp4", "noise_scale", ""] > 0
    assert ("delayed", "noise_scale", "") not in found, "there is one micro-batch"
    assert found["delayed", "attention_score", "blocks.0.attn"] > 0
    assert found["cnn", "batch_norm_drift", "blocks.0.norm_first"] > 0
    assert found["delayed", "embedding_spread", "embedding"] > 0 and found["delayed", "memory", ""] > 1 << 20
    assert 0 < found["delayed", "watched_seconds", ""] < 60


def test_lines_after_a_checkpoint_are_those_without_one(corpus: Corpus, tmp_path: Path) -> None:
    """Drifts included, which are from one reading to the next."""
    task = replace(task_of(corpus, ARMS[0], steps=4), stride=1)
    lab = lab_of(task)
    lab.advance("delayed", 2)
    other = restarted(lab, task, tmp_path)
    wanted, again = (
        [line for line in each.advance("delayed", 2) if isinstance(line, LayerReading)] for each in (lab, other)
    )
    assert wanted == again and wanted[0].drift is not None


def small_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 1))


def test_nothing_stays_attached_whatever_happens(corpus: Corpus) -> None:
    """Neither after a step, nor after one that has failed in the middle."""
    model = small_model()
    watch = ModelWatch(model)
    with watch.step(micro_batches=2):
        assert hooks_of(model) > 4
    assert hooks_of(model) == 0
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"), watch.step(micro_batches=2):
        model(torch.zeros(3, 9))
    assert hooks_of(model) == 0
    compiled = nn.Sequential(small_model(), nn.Linear(1, 2))
    compiled[0].compile(backend="eager")
    assert [path for path, _ in ModelWatch(compiled).modules] == ["1"], "inside a graph nobody looks"
    lab = lab_of(replace(task_of(corpus, "fp8"), stride=1))
    lab.advance("fp8", 1)
    built = lab._trainers["fp8"]._model
    assert hooks_of(built) == 0
    assert not any(isinstance(getattr(one, "arithmetic", None), WatchedArithmetic) for one in built.modules())
    assert all(type(one.core).__name__ == "FusedCore" for one in built.modules() if isinstance(one, SelfAttention))


def test_noise_of_gradients_is_that_of_their_definition() -> None:
    """Over the gradients of single micro-batches, taken one by one."""
    model, batches = small_model(), [torch.randn(5, 8) for _ in range(4)]
    alone = [torch.autograd.grad(model(batch).square().mean(), list(model.parameters())) for batch in batches]
    watch = ModelWatch(model, examples=5)
    with watch.step(micro_batches=4) as seen:
        for batch in batches:
            (model(batch).square().mean() / 4).backward()
        seen.updated({}, {})
    found = {(one.name, one.layer): one.value for one in watch.lines(0, seen) if isinstance(one, StepFigure)}
    variances, signals = [], []
    for (name, _), gradients in zip(model.named_parameters(), zip(*alone, strict=True), strict=True):
        every = torch.stack([one.flatten() for one in gradients]).double()
        variance = float(every.var(0).sum())
        variances.append(variance)
        signals.append(float(every.mean(0).square().sum()) - variance / 4)
        ratio = math.sqrt(max(signals[-1], 0) / variance)
        assert found["gradient_snr", name] == pytest.approx(ratio, rel=1e-3)  # float32's own of a difference
    joint = GradientNoise(sum(variances), sum(signals))
    assert found["gradient_snr", ""] == pytest.approx(joint.ratio, rel=1e-3)
    assert found["noise_scale", ""] == pytest.approx(5 * joint.scale, rel=1e-3)
    # Gradients that are alike have none; of those that cancel each other there is nothing but noise.
    alike, opposite = noise_of(2, 2.0, 4.0), noise_of(2, 2.0, 0.0)
    assert (alike.ratio, alike.scale, opposite.ratio, opposite.scale) == (math.inf, 0.0, 0.0, math.inf)


@for_each(("heads", "key_heads", "tokens"), [(4, 4, 30), (4, 2, 300)])
@for_each("causal", [True, False])
def test_the_largest_attention_score(heads: int, key_heads: int, tokens: int, causal: bool) -> None:
    """Of those that softmax gets, made all at once here."""
    q, k = torch.randn(2, heads, tokens, 16), torch.randn(2, key_heads, tokens, 16)
    k[0, 1, -1] = 9 * q[0, heads // key_heads, 5]  # a key that only later queries may see
    scores = q[0] @ k[0].repeat_interleave(heads // key_heads, 0).transpose(-1, -2) / 4
    wanted = scores[:, torch.ones(tokens, tokens).tril().bool()] if causal else scores
    assert float(attention_score(q, k, causal)) == pytest.approx(float(wanted.abs().max()), rel=1e-5)


def test_batch_norms_and_embeddings() -> None:
    """A mean that is off by two deviations; rows that are all alike."""
    x = torch.randn(4000, 6) * 3 + 10
    assert float(batch_norm_drift(x, x.mean(0) + 6, channels_last=False)) == pytest.approx(2, rel=0.05)
    assert float(batch_norm_drift(x.view(40, 100, 6), x.mean(0), channels_last=True)) == pytest.approx(0, abs=1e-4)
    assert float(embedding_spread(torch.ones(5, 8))) == 0
    assert float(embedding_spread(torch.tensor([[1.0, 0.0], [-1.0, 0.0]]))) == 1
