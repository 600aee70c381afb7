"""Readings of tensors against their definitions in numpy, over all recipes; and watched steps, which change no
number."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from fp8bench.features.train.lab import readings
from fp8bench.features.train.lab.lab import Lab
from fp8bench.features.train.lab.readings import (
    describe_cast,
    make_layer_reading,
    max_attention_score,
    measure_batch_norm_drift,
    measure_embedding_spread,
    measure_tensor_figures,
    move_figures_to_host,
)
from fp8bench.features.train.lab.watched_step import ModelWatch
from fp8bench.features.train.values import Arm, LayerReading, StepFigure, StepRow, StreamLine
from fp8bench.formats.codes import decode
from fp8bench.formats.grids import FORMATS, Format
from fp8bench.formats.recipes import Scaling
from fp8bench.formats.scaled import quantise
from fp8bench.nn.arithmetics import RecipeArithmetic
from fp8bench.nn.attention import SelfAttention
from fp8bench.numerics.operands import OperatorWatch
from fp8bench.plan.corpus import Corpus
from fp8bench.protocols import Arithmetic, Role, WatchedArithmetic
from fp8bench.registry import precisions
from tests.counts import for_each
from tests.facts import CPU
from tests.features.train.lab.labs import hooks_of, lab_of, restarted, rows, task_of
from tests.formats.scaling_definitions import gaussian

MODES = (
    "fp32",
    "bf16",
    "fp16",
    "tf32",
    *(name for name in precisions.names() if name.startswith(("fp8", "mx", "nv"))),
    "mxfp8:scale=floor",
    "mxfp4:scale=floor",
    "fp8-delayed:margin=2",
)


def reading(arithmetic: Arithmetic, x: Tensor, role: Role, before: float | None = None) -> tuple[LayerReading, Tensor]:
    operand = arithmetic.cast(x, role)
    (figures,) = move_figures_to_host([measure_tensor_figures(x, describe_cast(arithmetic, operand, x, role))])
    return make_layer_reading("arm", 1, 2, "layer", role.value, figures, before), arithmetic.restore(
        operand, torch.float32
    )


Array = NDArray[np.float64]


def factors(x: Tensor, fmt: Format, scaling: Scaling) -> Array:
    """The factor of each element, from the stored scales of the tensor."""
    stored = quantise(x.nan_to_num(0.0, 0.0, 0.0), fmt, scaling)
    assert stored.scales is not None
    steps = stored.scales if scaling.scale is None else decode(stored.scales, scaling.scale)
    if stored.tensor_scale is not None:
        steps = steps * stored.tensor_scale
    rows, columns = scaling.rows or x.shape[0], scaling.columns or x.shape[1]
    wide = steps.reshape(-(-x.shape[0] // rows), -1).repeat_interleave(rows, 0).repeat_interleave(columns, 1)
    return wide[: x.shape[0], : x.shape[1]].double().numpy()


def check(arithmetic: Arithmetic, x: Tensor, role: Role) -> LayerReading:
    """Compares counts exactly, sums up to rounding."""
    line, left = reading(arithmetic, x, role)
    a, b = x.double().numpy(), left.double().numpy()
    sound = np.isfinite(a)
    kept = sound & np.isfinite(b)
    exact, count = a[sound], a.size
    magnitudes = np.abs(exact)
    nonzero = magnitudes[magnitudes > 0]
    assert line.amax == magnitudes.max() and line.smallest == (nonzero.min() if nonzero.size else 0.0)
    scale = max(line.amax, 1e-300)
    assert line.mean / scale == pytest.approx(np.mean(exact / scale), rel=1e-5, abs=1e-7)
    assert line.deviation / scale == pytest.approx(np.std(exact / scale), rel=2e-5, abs=1e-7)
    assert line.zeros == np.count_nonzero(exact == 0) / count
    assert line.not_finite == np.count_nonzero(~kept) / count
    assert line.underflow == np.count_nonzero(sound & (a != 0) & (b == 0)) / count >= 0
    e = np.where(kept, b, 0.0) - np.where(kept, a, 0.0)
    signal, noise = ((np.where(kept, a, 0.0) / scale) ** 2).sum(), ((e / scale) ** 2).sum()
    if line.signal_to_noise is None:
        assert noise == 0
    else:
        assert line.signal_to_noise == pytest.approx(10 * np.log10(signal / noise) if noise else 200.0, abs=1e-3)
    return line


def spread_out(shape: tuple[int, int], seed: int = 0) -> Tensor:
    """Values over many octaves, with zeros, a zero row and block, subnormal numbers, an incomplete end."""
    x = gaussian(*shape, seed=seed) * torch.exp2(torch.arange(shape[1]) % 40 - 25.0)
    x[:, ::7] = 0
    x[3] = 0
    x[5, 32:64] = 0
    x[2, :3] = torch.tensor([1e-41, -1e-45, -0.0])
    return x


@for_each("mode", MODES)
def test_each_figure_is_its_definition(mode: str) -> None:
    """In each role, for float32 and the carrier's dtype."""
    arithmetic = precisions.get(mode).arithmetic(CPU).layer("layer")
    for role in Role:
        for x in (gaussian(40, 96), spread_out((40, 100)), spread_out((33, 70)).to(arithmetic.carrier)):
            line = check(arithmetic, x, role)
            if isinstance(arithmetic, RecipeArithmetic) and arithmetic.recipe.delayed is None:
                if arithmetic.treatments[role].scaling is None:
                    assert line.scale == line.least_scale == line.largest_scale == 1.0
                else:
                    check_scales(arithmetic, x, role, line)


def check_scales(arithmetic: RecipeArithmetic, x: Tensor, role: Role, line: LayerReading) -> None:
    """Over non-zero blocks whose scale did not remove everything."""
    treatment = arithmetic.treatments[role]
    assert treatment.scaling is not None
    steps, a = factors(x.float(), treatment.fmt, treatment.scaling), np.abs(x.double().numpy())
    beyond = np.where(steps > 0, a / np.where(steps > 0, steps, 1) / treatment.fmt.largest, 0.0)
    assert line.saturated == np.count_nonzero(beyond > 1 + 2.0**-21) / a.size
    assert line.lag == pytest.approx(max(np.log2(beyond.max()), 0.0 if beyond.max() > 1 else -math.inf), abs=1e-6)
    rows, columns = treatment.scaling.rows or a.shape[0], treatment.scaling.columns or a.shape[1]
    used = [
        1 / steps[i, j]
        for i in range(0, a.shape[0], rows)
        for j in range(0, a.shape[1], columns)
        if a[i : i + rows, j : j + columns].any() and steps[i, j] > 0
    ]
    assert (line.least_scale, line.largest_scale) == pytest.approx((min(used), max(used)), rel=1e-7)
    assert math.log2(line.scale) == pytest.approx(np.mean(np.log2(used)), abs=1e-6)


@for_each("mode", ["bf16", "fp16", "fp8", "fp8-delayed", "fp8-rowwise", "mxfp8", "nvfp4"])
@for_each("bad", [math.inf, math.nan])
def test_what_is_not_finite_is_counted_and_stands_nowhere_else(mode: str, bad: float) -> None:
    """Other figures ignore it; a block lost because of it is counted."""
    arithmetic = precisions.get(mode).arithmetic(CPU).layer("layer")
    x = spread_out((24, 64))
    x[1, 1] = bad
    line = check(arithmetic, x, Role.INPUT)
    assert line.not_finite >= 1 / x.numel() and math.isfinite(line.amax)


def test_readings_of_zeros_of_nothing_and_of_nan() -> None:
    arithmetic = precisions.get("fp8").arithmetic(CPU)
    zeros = check(arithmetic, torch.zeros(4, 8), Role.INPUT)
    assert (zeros.zeros, zeros.amax, zeros.smallest, zeros.lag, zeros.signal_to_noise) == (1, 0, 0, None, None)
    assert zeros.underflow == zeros.saturated == 0 and zeros.scale == 1
    figures = move_figures_to_host(
        [measure_tensor_figures(x) for x in (torch.zeros(0, 8), torch.full((2, 2), math.nan))]
    )
    nothing, lost = (make_layer_reading("arm", 0, 0, "", "input", each, None) for each in figures)
    assert nothing.zeros == 0
    assert lost.not_finite == 1 and lost.amax == lost.smallest == 0 and math.isnan(lost.mean)


def test_squares_neither_overflow_nor_vanish_and_small_spreads_keep_their_digits() -> None:
    for size in (1e-30, 1e-20, 3e19, 1e37):
        line = check(precisions.get("bf16").arithmetic(CPU), gaussian(8, 64) * size, Role.WEIGHT)
        assert line.deviation == pytest.approx(size, rel=0.2) and line.signal_to_noise is not None
    check(precisions.get("fp32").arithmetic(CPU), 1000 + gaussian(64, 64), Role.WEIGHT)


@for_each("piece", [1 << 26, 1000], ids=["whole", "in pieces"])
def test_the_path_for_gpus_gives_the_same(piece: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """It counts everything, as it never reads a number to find out whether it has to. A CPU reads chunks, of which some
    are zeros alone."""
    monkeypatch.setattr(readings, "_CPU_CHUNK_VALUES", min(piece, 1 << 17))
    arithmetic = precisions.get("fp8").arithmetic(CPU)
    tensors = [gaussian(40, 96), spread_out((40, 100)), gaussian(40, 96).bfloat16(), 100 + gaussian(33, 7)]
    tensors.append(tensors[1].index_fill(1, torch.tensor([3]), math.inf))
    tensors.append(torch.cat([gaussian(30, 96).relu(), torch.zeros(30, 96), gaussian(5, 96)]))
    quick = [reading(arithmetic, x, Role.GRADIENT)[0] for x in tensors]
    monkeypatch.setattr(readings, "is_read_at_once", lambda x: False)
    monkeypatch.setattr(readings, "_GPU_PIECE_VALUES", piece)
    for x, before in zip(tensors, quick, strict=True):
        line, _ = reading(arithmetic, x, Role.GRADIENT)
        for name in ("amax", "smallest", "zeros", "underflow", "saturated", "not_finite", "scale"):
            assert getattr(line, name) == getattr(before, name), name
        assert line.deviation == pytest.approx(before.deviation, rel=1e-6)
        assert line.mean == pytest.approx(before.mean, rel=1e-5, abs=1e-6 * line.amax)
        assert line.signal_to_noise == pytest.approx(before.signal_to_noise, abs=1e-4)
    huge, _ = reading(arithmetic, gaussian(4, 8) * 1e25, Role.GRADIENT)
    assert math.isnan(huge.deviation) and huge.signal_to_noise is None, "float32 has no squares of these"


# Scales of rows or blocks, computed for each cast.
CURRENT = ("fp8-rowwise", "fp8-block", "mxfp8", "nvfp4")


class _Waits(OperatorWatch):
    """Raises where a number is read, which would wait for a GPU; counts operators."""

    def __init__(self) -> None:
        super().__init__()
        self.operators = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = func.overloadpacket.__name__
        assert name not in ("_local_scalar_dense", "nonzero", "masked_select"), f"{name} waits for the device"
        self.operators += name not in ("view", "detach", "reshape", "_unsafe_view", "as_strided", "expand", "select")
        return func(*args, **(kwargs or {}))


@for_each("mode", ["bf16", "fp16", "fp8", "fp8-delayed", "fp8-rowwise", "fp8-block", "mxfp8", "nvfp4"])
def test_on_a_gpu_nothing_waits_before_the_final_read(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(readings, "is_read_at_once", lambda x: False)
    arithmetic = precisions.get(mode).arithmetic(CPU).layer("layer")
    for role, x in ((Role.WEIGHT, gaussian(32, 256)), (Role.GRADIENT, spread_out((32, 256)).to(arithmetic.carrier))):
        cast = describe_cast(arithmetic, arithmetic.cast(x, role), x, role)
        with _Waits() as seen:
            figures = measure_tensor_figures(x, cast)
        assert (
            15 < seen.operators < (95 if mode in CURRENT else 40)
            and move_figures_to_host([figures])[0]["count"] == x.numel()
        )


def test_delayed_scales_have_lag_and_drift() -> None:
    """The scale is that of the previous cast: a fourfold growth is two octaves beyond the maximum."""
    arithmetic = precisions.get("fp8-delayed:history=1").arithmetic(CPU).layer("layer")
    x = gaussian(16, 64)
    arithmetic.cast(x, Role.INPUT)
    second, _ = reading(arithmetic, 4 * x, Role.INPUT)
    assert second.scale == pytest.approx(FORMATS["e4m3fn"].largest / float(x.abs().max()), rel=1e-6)
    assert second.lag == pytest.approx(2, abs=1e-5)
    assert second.saturated == float((4 * x.abs() > x.abs().max()).sum()) / x.numel() > 0
    third, _ = reading(arithmetic, 4 * x, Role.INPUT, before=second.scale)
    assert third.drift == pytest.approx(2) and third.lag == pytest.approx(0, abs=1e-5) and third.saturated == 0


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
    """The lines of a training that is watched in every second step."""
    return advanced(lab_of(replace(task_of(corpus, *ARMS, steps=5), stride=2)), 5)


def test_watching_changes_no_loss(lines: list[StreamLine], corpus: Corpus) -> None:
    """Bit for bit: with delayed scales, stochastic rounding, dropout, recomputed blocks, a loss scale."""
    unwatched = rows(advanced(lab_of(replace(task_of(corpus, *ARMS, steps=5), stride=1000)), 5))
    assert list(map(repr, rows(lines))) == list(map(repr, unwatched)) and len(unwatched) == 25  # NaN equals NaN
    assert all((row.seconds == 0) == (row.step % 2 == 0) for row in lines if isinstance(row, StepRow))


def test_every_layer_is_read_once_a_watched_step(lines: list[StreamLine]) -> None:
    """Each role once, for any number of micro-batches and recomputed blocks."""
    keys = [(line.arm, line.step, line.layer, line.role) for line in lines if isinstance(line, LayerReading)]
    assert len(set(keys)) == len(keys) and {step for _, step, _, _ in keys} == {0, 2, 4}
    products = {(layer, role.value) for layer in LAYERS for role in Role}
    for arm in ("delayed", "nvfp4", "fp16"):
        assert {key[2:] for key in keys if key[0] == arm} == {
            *products,
            ("embedding", "weight"),
            ("positions", "weight"),
        }
    assert ("cnn", 0, "blocks.0.first", "gradient") in keys
    assert ("moe", 0, "blocks.0.mlp.experts.7.up", "input") in keys


def test_other_figures_of_a_watched_step(lines: list[StreamLine]) -> None:
    values = {
        (line.arm, line.name, line.layer): line.value
        for line in lines
        if isinstance(line, StepFigure) and line.step == 4
    }
    for layer in LAYERS:
        assert 0 < values["nvfp4", "update_ratio", layer] < 0.1
        assert values["nvfp4", "output_amax", layer] > 0
    assert values["delayed", "attention_score", "blocks.0.attn"] > 0
    assert values["cnn", "batch_norm_drift", "blocks.0.norm_first"] > 0
    assert values["delayed", "embedding_spread", "embedding"] > 0 and values["delayed", "memory", ""] > 1 << 20
    assert 0 < values["delayed", "watched_seconds", ""] < 60


def test_lines_after_a_checkpoint_are_those_without_one(corpus: Corpus, tmp_path: Path) -> None:
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
    model = small_model()
    watch = ModelWatch(model)
    with watch.watch_step():
        assert hooks_of(model) == 3
    assert hooks_of(model) == 0
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"), watch.watch_step():
        model(torch.zeros(3, 9))
    assert hooks_of(model) == 0
    compiled = nn.Sequential(small_model(), nn.Linear(1, 2))
    compiled[0].compile(backend="eager")
    assert {*ModelWatch(compiled).modules.values()} == {"", "1"}, "inside a graph nobody looks"
    lab = lab_of(replace(task_of(corpus, "fp8"), stride=1))
    lab.advance("fp8", 1)
    built = lab._trainers["fp8"].model
    assert hooks_of(built) == 0
    assert not any(isinstance(getattr(module, "arithmetic", None), WatchedArithmetic) for module in built.modules())
    assert all(
        type(module.core).__name__ == "FusedCore" for module in built.modules() if isinstance(module, SelfAttention)
    )


@for_each(("heads", "key_heads", "tokens"), [(4, 4, 30), (4, 2, 300)])
@for_each("causal", [True, False])
def test_the_largest_attention_score(heads: int, key_heads: int, tokens: int, causal: bool) -> None:
    """The oracle computes all inputs of softmax at once."""
    q, k = torch.randn(2, heads, tokens, 16), torch.randn(2, key_heads, tokens, 16)
    k[0, 1, -1] = 9 * q[0, heads // key_heads, 5]  # a key that only later queries may see
    scores = q[0] @ k[0].repeat_interleave(heads // key_heads, 0).transpose(-1, -2) / 4
    wanted = scores[:, torch.ones(tokens, tokens).tril().bool()] if causal else scores
    assert float(max_attention_score(q, k, causal)) == pytest.approx(float(wanted.abs().max()), rel=1e-5)


def test_batch_norms_and_embeddings() -> None:
    """A mean two deviations off; identical rows."""
    x = torch.randn(4000, 6) * 3 + 10
    assert float(measure_batch_norm_drift(x, x.mean(0) + 6, channels_last=False)) == pytest.approx(2, rel=0.05)
    assert float(measure_batch_norm_drift(x.view(40, 100, 6), x.mean(0), channels_last=True)) == pytest.approx(
        0, abs=1e-4
    )
    assert float(measure_embedding_spread(torch.ones(5, 8))) == 0
    assert float(measure_embedding_spread(torch.tensor([[1.0, 0.0], [-1.0, 0.0]]))) == 1
