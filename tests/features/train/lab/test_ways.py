"""Ways to train together, with threads as ranks, against one process that rounds by another library, or against the
whole model; mistakes are planted. Real ranks train in test_rank_lab.py."""

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
from fp8bench.features.train.lab import parallelism as ranks_together
from fp8bench.features.train.lab import ways
from fp8bench.features.train.lab.low_precision import Gradients
from fp8bench.features.train.lab.parallelism import FullySharded, TensorParallel, digest_tensors
from fp8bench.features.train.lab.rates import join_norms
from fp8bench.features.train.lab.step_optimizer import StepOptimizer, make_step_optimizer
from fp8bench.features.train.lab.ways import BF16Group, SampledGroup, SequenceParallel, ZeroTensors
from fp8bench.features.train.request import WIRES, TrainerSettings
from fp8bench.nn.arithmetics import PlainArithmetic
from fp8bench.nn.gpt import GPT
from fp8bench.nn.parallel.exchanges import FP8Group, FP8Wire
from fp8bench.nn.parallel.ways import find_cut
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
STREAMS = {
    "fp32": type("Noted", (SampledGroup, ThreadedGroup), {}),
    "bf16": type("NotedBF16", (SampledGroup, BF16Group, ThreadedGroup), {}),
    "fp8": type("NotedFP8", (SampledGroup, FP8Group), {}),
}


@pytest.fixture(autouse=True)
def _on_boards(monkeypatch: pytest.MonkeyPatch) -> None:
    assert STREAMS.keys() == ways.GROUPS_BY_WIRE.keys() == set(WIRES)
    monkeypatch.setattr(
        FP8Wire, "send", lambda wire, program, values, phase: on_board(wire.group, program(values, wire._rank))
    )
    monkeypatch.setattr(ways, "GROUPS_BY_WIRE", dict(STREAMS))


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
    """A rank's weights at the end, its faults, three norms of each step, and the bytes of what it keeps."""

    weights: list[Tensor]
    faults: str = ""
    norms: Sequence[float] = ()
    sizes: Mapping[str, int] = {}


def update(optimizer: StepOptimizer, norms: Callable[[list[Tensor]], list[Tensor]] = list) -> list[float]:
    own = [optimizer.gradients.norms()]
    optimizer.step(1.0, [torch.tensor(1.0)] * 99, torch.tensor(0.0))
    return [float(join_norms(norms(each))) for each in (*own, optimizer.update_norms, optimizer.weight_norms)]


def alone(ranks: int, wire: str = "fp32", **settings: Any) -> Learnt:
    """The whole model with the average of all ranks' gradients; weights in their sent form."""
    own, norms = parameters(), list[float]()
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
    plant: Callable[[Any, int], object] = lambda together, rank: None,
    exchanges: type[ThreadedGroup] = ThreadedGroup,
    brings: Callable[[int, int], list[Tensor]] = gradients,
    **settings: Any,
) -> list[Learnt]:
    def run(place: Place) -> Learnt:
        together, wholes, norms = make(exchanges(place)), parameters(), list[float]()
        optimizer = make_step_optimizer(together.divide_parameters(wholes), TrainerSettings(rate=1e-2, **settings))
        sizes = {name: sum(tensor.nbytes for tensor in some) for name, some in optimizer.stored_tensors().items()}
        plant(together, place.number)
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
            weights = [parameter.detach().clone() for parameter in wholes.values()]
            return Learnt(weights, " ".join(together.find_faults()), norms, sizes)

    return on_ranks(ranks, run)


def wholes(wire: str) -> Callable[[ThreadedGroup], FullySharded]:
    return partial(ZeroTensors, wire=wire)


def faulty(ranks: Sequence[Learnt], words: str) -> set[int]:
    return {rank for rank, learnt in enumerate(ranks) if words in learnt.faults}


@for_each("settings", [{}, {"master": "fp16-scaled"}, {"optimizer_states": "bf16"}], ids=str)
def test_rows_are_updated_as_the_whole_is(settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """For any number of rows per message; norms count each row once."""
    wanted = alone(3, **settings)
    for most in (1 << 22, 100):
        monkeypatch.setattr(ranks_together, "_MAX_SHARDED_ELEMENTS", most)
        ranks = trained(3, FullySharded, **settings)
        for learnt in ranks:
            assert not learnt.faults and learnt.norms == ranks[0].norms == pytest.approx(wanted.norms, rel=1e-6)
            torch.testing.assert_close(learnt.weights, wanted.weights, rtol=1e-6, atol=1e-7)
    if not settings:
        own = dict.fromkeys(("weights", "gradients", "first moment", "second moment"), 4 * (8 * 16 + 6 + 11 * 8 + 5))
        assert all(learnt.sizes == own | {"steps": 16} for learnt in ranks), "its rows alone"


def planted(**methods: Any) -> type[ThreadedGroup]:
    return type("Planted", (ThreadedGroup,), methods)


own_part, all_parts = ThreadedGroup.own_part, ThreadedGroup.all_parts
FORGETS = planted(own_part=lambda own, parts: (own_part(own, parts), parts[1] * own.size)[own.rank == 1])
OF_A_NEIGHBOUR = planted(own_part=lambda own, parts: own_part(own, parts.roll(1, 0)))
UNDIVIDED = planted(own_part=lambda own, parts: own_part(own, parts) * own.size)
MISPLACES = planted(all_parts=lambda own, x: all_parts(own, x).roll(int(own.rank == 2), 0))


@for_each(
    ("exchanges", "ranks", "words"),
    [
        (FORGETS, {1}, "not the mean"),
        (OF_A_NEIGHBOUR, {0, 1, 2}, "not the mean"),
        (UNDIVIDED, {0, 1, 2}, "not the mean"),
        (MISPLACES, {2}, "its own rows"),
    ],
)
def test_wrong_rows_are_found(exchanges: type[ThreadedGroup], ranks: set[int], words: str) -> None:
    assert faulty(trained(3, FullySharded, exchanges=exchanges), words) == ranks


@for_each("value", [float("nan"), float("inf"), 3e38])
@for_each("wire", ["", *WIRES])
def test_what_is_not_finite_on_one_rank_is_so_on_all_and_is_no_fault(wire: str, value: float) -> None:
    """E4M3 has no infinity: 448 in its place would be an update. The same for a sum that overflows."""
    if wire and value == 3e38:
        return

    def brings(step: int, rank: int) -> list[Tensor]:
        return [tensor.fill_(value) if rank or value == 3e38 else tensor for tensor in gradients(step, rank)]

    for weights, faults, norms, _ in trained(3, wholes(wire) if wire else FullySharded, brings=brings):
        assert not faults and not norms[0] < float("inf") and all(weight.isnan().all() for weight in weights)


def test_a_digest_depends_on_the_place_of_values() -> None:
    """Otherwise a rank with two swapped rows would have the others' digest."""
    first, other = torch.randn(2, 3, 5)
    digests = [
        digest_tensors(some)
        for some in ((first, other), (other, first), (first.flip(0), other), (first, other.roll(1)))
    ]
    assert len(set(digests)) == 4 and all(0 <= digest < 1 << 63 for digest in digests)


@for_each("wire", WIRES)
@for_each("ranks", [2, 3])
def test_owners_have_the_bits_of_one_process_that_rounds_what_travels(ranks: int, wire: str) -> None:
    """With two ranks sums are the same in any order."""
    wanted = alone(ranks, wire).weights
    for learnt in trained(ranks, wholes(wire)):
        assert not learnt.faults
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
        assert not learnt.faults and all(map(torch.equal, learnt.weights, wanted))


def sends_double(wire: Any) -> None:
    """Sends twice the values that its scale says."""
    own = wire.send
    wire.send = lambda program, x, phase: own(program, x * 2, phase)


def wrong_scale(together: ZeroTensors, rank: int) -> None:
    if rank == 1:
        sends_double(together._owned_tensors.fp8)


def half_read(together: ZeroTensors, rank: int) -> None:
    """Rank 1 reads the gradients that it owns with half their scale."""
    if rank == 1:
        own = together._owned_tensors.average
        together._owned_tensors.average = lambda some, phase: [mean / 2 for mean in own(some, phase)]  # type: ignore[method-assign]


def misheard(together: ZeroTensors, rank: int) -> None:
    """Rank 1 receives one changed value of a weight that it does not own."""
    if rank == 1:
        own = together._owned_tensors.distribute

        def put(kept: Any, wholes: Any, phase: Any) -> None:
            own(kept, wholes, phase)
            wholes[0].view(-1)[0] *= 1.0625

        together._owned_tensors.distribute = put  # type: ignore[method-assign]


@for_each(
    ("wire", "plant", "ranks", "words"),
    [
        ("fp8", wrong_scale, {0}, "a gradient that is not the mean"),
        ("fp8", wrong_scale, {0, 1}, "a weight that is not what"),
        *((wire, half_read, {1}, "a gradient that is not the mean of what all ranks sent: ") for wire in WIRES),
        *((wire, misheard, {1}, "has a weight that is not what its owner sent: embedding") for wire in WIRES),
    ],
)
def test_wrong_scales_and_wrong_values_are_found(
    wire: str, plant: Callable[[Any, int], object], ranks: set[int], words: str
) -> None:
    assert faulty(trained(2, wholes(wire), plant), words) >= ranks


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
    together, whole = TensorParallel(ThreadedGroup(place), CONFIG), model()
    together.cut_model(whole)
    together.divide_parameters(dict(whole.named_parameters()))
    return together, whole


def test_layers_keep_their_paths_and_norms_count_everything_once() -> None:
    """Also for several figures of all parameters in a row."""
    names, whole = [name for name, _ in model().named_parameters()], torch.stack(norms_of(model()))

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
        same = [cut(place)[0].share_scales(name, arithmetic) is arithmetic for name in names]
        return same, float(cut(place)[0]._largest_over_ranks(torch.tensor([1.0, float("nan")][place.number])))

    assert on_ranks(2, scales) == [([False, False, True], float("inf"))] * 2


def batch() -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(5)
    tokens, targets = torch.randint(CONFIG.vocabulary, (2, CONFIG.batch, CONFIG.sequence), generator=draw)
    return tokens, targets


# Small weights keep attention soft, so that rounding changes little.
SMALL = 0.3
StreamLearnt = tuple[float, dict[str, Tensor], tuple[str, ...]]


def streamed(wire: str, plant: Callable[[Any, int], object] = lambda together, rank: None) -> list[StreamLearnt]:
    """Loss, gradients and faults of ranks that each have some tokens of the stream."""

    def run(place: Place) -> StreamLearnt:
        together, own = SequenceParallel(ThreadedGroup(place), CONFIG, wire), model(SMALL)
        together.cut_model(own)
        named = dict(own.named_parameters())
        gradients = Gradients(list(together.divide_parameters(named).values()))
        plant(together, place.number)
        with together.materialise(PHASE):
            gradients.begin()
            loss = own(*batch(), PHASE)
            loss.backward()
            together.average_gradients(gradients, PHASE)
            return float(loss.detach()), dict(zip(named, gradients.fill_missing(), strict=True)), together.find_faults()

    return on_ranks(2, run)


@for_each(("wire", "near"), [("fp32", 1e-5), ("bf16", 0.03), ("fp8", 0.2)])
def test_loss_and_gradients_of_a_stream_are_the_whole_models(wire: str, near: float) -> None:
    """Norms in blocks see only a rank's tokens and get summed gradients; common tensors are equal to the bit."""
    whole = model(SMALL)
    loss = whole(*batch(), PHASE)
    loss.backward()
    ranks = streamed(wire)
    for rank, (own, gradients, faults) in enumerate(ranks):
        assert not faults and own == ranks[0][0] == pytest.approx(float(loss.detach()), rel=near / 10)
        for name, parameter in whole.named_parameters():
            assert parameter.grad is not None
            how, wanted = find_cut(name, CONFIG), parameter.grad
            if how is None:
                assert torch.equal(gradients[name], ranks[0][1][name]), name
            else:
                wanted = how.share(wanted, rank, 2)
            assert (gradients[name] - wanted).norm() <= near * wanted.norm(), name


def own_part_but_once(own: Any, parts: Tensor) -> Tensor:
    """In the third sum rank 1 receives only its own part."""
    whole, place = own_part(own, parts), own.handle
    place.sums = getattr(place, "sums", 0) + 1
    return parts[1] if own.rank == 1 and place.sums == 3 else whole


def test_wrong_tokens_are_found_by_all_ranks_that_get_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """A sum that one rank did not receive, and a wrong scale of a message from rank 1."""

    def found_by(ranks: list[StreamLearnt]) -> set[int]:
        words = "received tokens of the stream that are not what all ranks sent"
        return {rank for rank, (_, _, faults) in enumerate(ranks) if words in faults}

    assert found_by(streamed("fp8", lambda together, rank: rank and sends_double(together.token_group.wire))) == {0, 1}
    forgetful = type("NotedForgetful", (SampledGroup, planted(own_part=own_part_but_once)), {})
    monkeypatch.setitem(ways.GROUPS_BY_WIRE, "fp32", forgetful)
    assert found_by(streamed("fp32")) == {1}
