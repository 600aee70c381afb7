"""Ways to train together, with threads as ranks, against one process that rounds by another library, or against the
whole model. Real ranks train in test_rank_lab.py."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
import pytest
import torch
from torch import Tensor, nn

from fp8bench.errors import UsageError
from fp8bench.features.train.arms import MSAMP_LEVELS
from fp8bench.features.train.lab import parallelism
from fp8bench.features.train.lab.low_precision import Gradients
from fp8bench.features.train.lab.parallelism import (
    BF16Group,
    FullySharded,
    SequenceParallel,
    TensorParallel,
    ZeroTensors,
    digest_tensor_bits,
)
from fp8bench.features.train.lab.rates import join_norms
from fp8bench.features.train.lab.step_optimizer import StepOptimizer, make_step_optimizer
from fp8bench.features.train.request import WIRE_FORMATS, TrainerSettings
from fp8bench.nn.arithmetics import PlainArithmetic
from fp8bench.nn.gpt import GPT
from fp8bench.nn.parallel.exchanges import FP8Group, FP8Wire
from fp8bench.nn.parallel.ways import find_weight_cut
from fp8bench.nn.sizes import GPTConfig
from fp8bench.protocols import SilentPhases
from fp8bench.registry import precisions
from tests.counts import for_each
from tests.facts import CPU
from tests.nn.parallel.ranks import Place, ThreadedGroup, on_board, on_ranks

# Rows that three ranks share equally, and unequally; fewer rows than ranks.
SHAPES = {"embedding": (24, 16), "norm.weight": (16,), "blocks.0.mlp.up.weight": (31, 8), "head.weight": (2, 5)}
STEPS = 3
PHASE = SilentPhases()


# A stream in the arm's 16-bit type, and as codes.
STREAMS = {"fp32": ThreadedGroup, "bf16": type("ThreadedBF16", (BF16Group, ThreadedGroup), {}), "fp8": FP8Group}


@pytest.fixture(autouse=True)
def _on_boards(monkeypatch: pytest.MonkeyPatch) -> None:
    assert STREAMS.keys() == parallelism.GROUPS_BY_WIRE.keys() == set(WIRE_FORMATS)
    monkeypatch.setattr(
        FP8Wire, "send", lambda wire, program, values, phase: on_board(wire.group, program(values, wire._rank))
    )
    monkeypatch.setattr(parallelism, "GROUPS_BY_WIRE", STREAMS)


def drawn(seed: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator) for shape in SHAPES.values()]


def parameters() -> dict[str, nn.Parameter]:
    return dict(zip(SHAPES, map(nn.Parameter, drawn(1)), strict=True))


def gradients(step: int, rank: int) -> list[Tensor]:
    """Gradients with magnitudes that vary by tensor and by rank."""
    return [tensor * 10.0 ** (3 * place - 4 + rank) for place, tensor in enumerate(drawn(100 * rank + step))]


def as_sent(values: Tensor, wire: str, amax: float | None = None) -> Tensor:
    """The sent values by definition, in another library's formats."""
    own = values.detach().clone().numpy()
    if wire == "fp32":
        return values.detach().clone()
    if wire == "bf16":
        return torch.from_numpy(own.astype(ml_dtypes.bfloat16).astype(np.float32))
    amax = float(np.abs(own).max()) if amax is None else amax
    scale = np.float32(2.0 ** np.floor(np.log2(448 / amax)) if amax else 1.0)
    return torch.from_numpy((own * scale).astype(ml_dtypes.float8_e4m3fn).astype(np.float32) / scale)


def mean(brought: Sequence[Tensor], wire: str) -> Tensor:
    amax = max(float(tensor.abs().max()) for tensor in brought)
    total = torch.zeros_like(brought[0])
    for tensor in brought:
        total += as_sent(tensor, wire, amax)
    return (as_sent(total, wire) if wire == "bf16" else total) / len(brought)  # bf16 is added in bf16


class Learnt(NamedTuple):
    """A rank's weights at the end, three norms of each step, and the bytes of what it keeps."""

    weights: list[Tensor]
    norms: Sequence[float] = ()
    sizes: Mapping[str, int] = {}


def update(optimizer: StepOptimizer, norms: Callable[[list[Tensor]], list[Tensor]] = list) -> list[float]:
    own = [optimizer.gradients.norms()]
    optimizer.step(1.0, [torch.tensor(1.0)] * 99, torch.tensor(0.0))
    return [float(join_norms(norms(each))) for each in (*own, optimizer.update_norms, optimizer.weight_norms)]


def alone(ranks: int, wire: str = "fp32", **settings: Any) -> Learnt:
    """The whole model with the average of all ranks' gradients; weights in their sent form."""
    own = parameters()
    norms = list[float]()
    optimizer = make_step_optimizer(own, TrainerSettings(rate=1e-2, **settings))
    for step in range(STEPS):
        optimizer.gradients.begin()
        for parameter, *parts in zip(own.values(), *(gradients(step, rank) for rank in range(ranks)), strict=True):
            parameter.grad = mean(parts, wire)
        optimizer.gradients.store_gradients()
        with optimizer.weights.materialise():
            norms += update(optimizer)
    with optimizer.weights.materialise():
        return Learnt([as_sent(parameter, wire) for parameter in own.values()], norms=norms)


def trained(
    ranks: int,
    make: Callable[[ThreadedGroup], FullySharded],
    brings: Callable[[int, int], list[Tensor]] = gradients,
    **settings: Any,
) -> list[Learnt]:
    def run(place: Place) -> Learnt:
        together = make(ThreadedGroup(place))
        wholes = parameters()
        norms = list[float]()
        optimizer = make_step_optimizer(together.divide_parameters(wholes), TrainerSettings(rate=1e-2, **settings))
        sizes = {name: sum(tensor.nbytes for tensor in some) for name, some in optimizer.stored_tensors().items()}
        for step in range(STEPS):
            with optimizer.weights.materialise(), together.materialise(PHASE):
                optimizer.gradients.begin()
                for parameter, gradient in zip(wholes.values(), brings(step, place.number), strict=True):
                    parameter.grad = gradient
                together.average_gradients(optimizer.gradients, PHASE)
                assert all(parameter.grad is None for parameter in wholes.values())
                norms += update(optimizer, together.join_norms)
        assert not any(parameter.untyped_storage().nbytes() for parameter in wholes.values())
        with optimizer.weights.materialise(), together.materialise(PHASE):
            return Learnt([parameter.detach().clone() for parameter in wholes.values()], norms, sizes)

    return on_ranks(ranks, run)


def wholes(wire: str) -> Callable[[ThreadedGroup], FullySharded]:
    return partial(ZeroTensors, wire=wire)


@for_each("settings", [{}, {"master": "fp16-scaled"}, {"optimizer_states": "bf16"}], ids=str)
def test_rows_are_updated_as_the_whole_is(settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """For any number of rows per message; norms count each row once."""
    wanted = alone(3, **settings)
    for most in (1 << 22, 100):
        monkeypatch.setattr(parallelism, "_MAX_SHARD_MESSAGE_ELEMENTS", most)
        ranks = trained(3, FullySharded, **settings)
        for learnt in ranks:
            assert learnt.norms == ranks[0].norms == pytest.approx(wanted.norms, rel=1e-6)
            torch.testing.assert_close(learnt.weights, wanted.weights, rtol=1e-6, atol=1e-7)
    if not settings:
        own = dict.fromkeys(("weights", "gradients", "first moment", "second moment"), 4 * (8 * 16 + 6 + 11 * 8 + 5))
        assert all(learnt.sizes == own | {"steps": 16} for learnt in ranks), "its rows alone"


@for_each("value", [float("nan"), float("inf"), 3e38])
@for_each("wire", ["", *WIRE_FORMATS])
def test_what_is_not_finite_on_one_rank_is_so_on_all(wire: str, value: float) -> None:
    """E4M3 has no infinity: 448 in its place would be an update. The same for a sum that overflows."""
    if wire and value == 3e38:
        return

    def brings(step: int, rank: int) -> list[Tensor]:
        return [tensor.fill_(value) if rank or value == 3e38 else tensor for tensor in gradients(step, rank)]

    for weights, norms, _ in trained(3, wholes(wire) if wire else FullySharded, brings):
        assert not norms[0] < float("inf") and all(weight.isnan().all() for weight in weights)


def test_a_digest_depends_on_the_place_of_values() -> None:
    """Otherwise a rank with two swapped rows would have the others' digest."""
    first, other = torch.randn(2, 3, 5)
    digests = [
        digest_tensor_bits(some)
        for some in ((first, other), (other, first), (first.flip(0), other), (first, other.roll(1)))
    ]
    assert len(set(digests)) == 4 and all(0 <= digest < 1 << 63 for digest in digests)


@for_each("wire", WIRE_FORMATS)
@for_each("ranks", [2, 3])
def test_owners_have_the_bits_of_one_process_that_rounds_what_travels(ranks: int, wire: str) -> None:
    """With two ranks sums are the same in any order."""
    wanted = alone(ranks, wire).weights
    for learnt in trained(ranks, wholes(wire)):
        if ranks == 2 or wire == "fp8":
            assert all(map(torch.equal, learnt.weights, wanted))
        else:
            torch.testing.assert_close(learnt.weights, wanted, rtol=2.0**-7, atol=1e-3)


@for_each(
    "settings",
    [
        {"master": "fp16-scaled"},
        {"optimizer_states": "fp8lm"},
        {"updates": "fp8"},
        {"optimizer": "adafactor"},
        {"gradients": "bf16"},
        {"gradients": "fp8", "micro_batches": 4, "parallel": "zero"},
        *(dict(level.settings) for level in MSAMP_LEVELS.values()),
    ],
    ids=str,
)
def test_owners_update_weights_as_one_process_does(settings: dict[str, Any]) -> None:
    """For every storage of weights; an owner receives one mean of all micro-batches."""
    wanted = alone(2, "fp8", **settings | {"micro_batches": 1}).weights
    for learnt in trained(2, wholes("fp8"), **settings):
        assert all(map(torch.equal, learnt.weights, wanted))


def test_each_rank_needs_a_weight() -> None:
    with pytest.raises(UsageError, match="4 weights are too few for 5 ranks"):
        trained(5, wholes("fp8"))


CONFIG = GPTConfig(64, 16, 1, 2, 2, 32, 2, 8)


def model(size: float = 1.0) -> GPT:
    """The same on every rank."""
    made = GPT(CONFIG, lambda name: PlainArithmetic(torch.float32), torch.float32)
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.copy_(size * torch.randn(parameter.shape, generator=generator))
    return made


def norms_of(whole: GPT) -> list[Tensor]:
    return [parameter.detach().norm() for parameter in whole.parameters()]


def cut(place: Place) -> tuple[TensorParallel, GPT]:
    together = TensorParallel(ThreadedGroup(place), CONFIG)
    whole = model()
    together.cut_model_for_rank(whole)
    together.divide_parameters(dict(whole.named_parameters()))
    return together, whole


def test_layers_keep_their_paths_and_norms_count_everything_once() -> None:
    """Also for several figures of all parameters in a row."""
    names = [name for name, _ in model().named_parameters()]
    whole = torch.stack(norms_of(model()))

    def norms(place: Place) -> list[Tensor]:
        together, own = cut(place)
        parameters = dict(own.named_parameters())
        assert list(parameters) == names and len(together.list_shared_parameters(parameters)) == len(names) - 4
        return together.join_norms(norms_of(own) * 2)

    for counted in on_ranks(2, norms):
        torch.testing.assert_close(torch.stack(counted), torch.cat([whole, whole]))


def test_scales_of_cut_tensors_alone_are_shared() -> None:
    """A NaN becomes an infinite largest magnitude."""

    def scales(place: Place) -> tuple[list[bool], float]:
        arithmetic = precisions.get("fp8").arithmetic(CPU)
        names = ("blocks.0.attn.qkv", "blocks.0.mlp.down", "head")
        same = [cut(place)[0].share_scales_across_ranks(name, arithmetic) is arithmetic for name in names]
        return same, float(cut(place)[0]._largest_over_ranks(torch.tensor([1.0, float("nan")][place.number])))

    assert on_ranks(2, scales) == [([False, False, True], float("inf"))] * 2


def batch() -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(5)
    tokens, targets = torch.randint(CONFIG.vocabulary, (2, CONFIG.batch, CONFIG.sequence), generator=draw)
    return tokens, targets


# Small weights keep attention soft, so that rounding changes little.
SMALL = 0.3


def streamed(wire: str) -> list[tuple[float, dict[str, Tensor]]]:
    """Loss and gradients of ranks that each have some tokens of the stream."""

    def run(place: Place) -> tuple[float, dict[str, Tensor]]:
        together = SequenceParallel(ThreadedGroup(place), CONFIG, wire)
        own = model(SMALL)
        together.cut_model_for_rank(own)
        named = dict(own.named_parameters())
        gradients = Gradients(list(together.divide_parameters(named).values()))
        with together.materialise(PHASE):
            gradients.begin()
            loss = own(*batch(), PHASE)
            loss.backward()
            together.average_gradients(gradients, PHASE)
            return float(loss.detach()), dict(zip(named, gradients.fill_missing_gradients(), strict=True))

    return on_ranks(2, run)


@for_each(("wire", "near"), [("fp32", 1e-5), ("bf16", 0.03), ("fp8", 0.2)])
def test_loss_and_gradients_of_a_stream_are_the_whole_models(wire: str, near: float) -> None:
    """Norms in blocks see only a rank's tokens and get summed gradients; common tensors are equal to the bit."""
    whole = model(SMALL)
    loss = whole(*batch(), PHASE)
    loss.backward()
    ranks = streamed(wire)
    for rank, (own, gradients) in enumerate(ranks):
        assert own == ranks[0][0] == pytest.approx(float(loss.detach()), rel=near / 10)
        for name, parameter in whole.named_parameters():
            assert parameter.grad is not None
            how = find_weight_cut(name, CONFIG)
            wanted = parameter.grad
            if how is None:
                assert torch.equal(gradients[name], ranks[0][1][name]), name
            else:
                wanted = how.share(wanted, rank, 2)
            assert (gradients[name] - wanted).norm() <= near * wanted.norm(), name
