"""Cuts of a model; tensor and sequence parallelism against one rank, with planted mistakes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from fp8bench.formats.scaled import largest_magnitude
from fp8bench.nn.arithmetics import PlainArithmetic, RecipeArithmetic, ScaledArithmetic
from fp8bench.nn.gpt import GPT
from fp8bench.nn.parallel import tensor_parallel
from fp8bench.nn.parallel.ways import WAYS, ModelPartSetup, ParallelCase, list_weight_cuts
from fp8bench.nn.shared_precisions import get_recipe
from fp8bench.nn.sizes import SIZES, GPTConfig, list_features
from fp8bench.protocols import Arithmetic, Role, SilentPhases
from fp8bench.registry import precisions
from tests.counts import for_each
from tests.facts import CPU
from tests.nn.parallel.ranks import Place, ThreadedGroup, on_ranks

BATCH, TOKENS, STEPS, RATE = 2, 8, 2, 0.05
GPT2 = GPTConfig(64, 32, 1, 4, 4, 64, BATCH, TOKENS)
LLAMA = replace(GPT2, key_heads=2, is_llama_like=True)
Updates = dict[str, Tensor]


@pytest.fixture(autouse=True)
def threads_as_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tensor_parallel, "RankGroup", ThreadedGroup)


def arithmetic(mode: str) -> Arithmetic:
    """The carrier is fp32, so that ranks differ from one rank only by the order of sums."""
    result = precisions.get(mode).arithmetic(CPU)
    return RecipeArithmetic(result.recipe, torch.float32) if isinstance(result, RecipeArithmetic) else result


def made(config: GPTConfig, mode: str) -> GPT:
    own, high = arithmetic(mode), PlainArithmetic(torch.float32)
    with torch.random.fork_rng():
        torch.manual_seed(1)
        return GPT(config, lambda name: high if name == "head" else own.layer(name), torch.float32)


def batches(config: GPTConfig) -> list[tuple[Tensor, Tensor]]:
    drawn = torch.randint(config.vocabulary, (STEPS, BATCH, TOKENS + 1), generator=torch.Generator().manual_seed(2))
    return [(tensor[:, :-1], tensor[:, 1:]) for tensor in drawn]


def trained_alone(config: GPTConfig, mode: str) -> tuple[list[float], Updates]:
    model = made(config, mode)
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    losses = []
    for tokens, targets in batches(config):
        loss = model(tokens, targets, SilentPhases())
        loss.backward()
        losses.append(float(loss.detach()))
        for parameter in model.parameters():
            assert parameter.grad is not None
            parameter.data.sub_(parameter.grad, alpha=RATE)
            parameter.grad = None
    return losses, {name: parameter.detach() - before[name] for name, parameter in model.named_parameters()}


def job_of(place: Place, models: list[GPT], config: GPTConfig, mode: str, amax: str) -> ModelPartSetup:
    """Models are created one after the other, because the random state belongs to the process."""
    handle: Any = place
    return ModelPartSetup(
        lambda: models[place.number], config, BATCH, CPU, True, 1.0, {"amax": amax, "wire": "stream"}, handle
    )


def trained_by(
    kind: type[tensor_parallel.TensorCut], config: GPTConfig, mode: str, ranks: int, amax: str = "own"
) -> list[tuple[list[float], Updates]]:
    models = [made(config, mode) for _ in range(ranks)]
    before = {name: parameter.detach().clone() for name, parameter in models[0].named_parameters()}

    def run(place: Place) -> tuple[list[float], Updates]:
        model = kind(job_of(place, models, config, mode, amax))
        losses = []
        for tokens, targets in batches(config):
            loss = model.loss(tokens, targets, SilentPhases())
            losses.append(float(torch.stack(model._rank_group.gather_from_ranks(loss)).mean()))
            torch._foreach_sub_(model.weights, model.gradients(), alpha=RATE)
            model.drop_gradients()
        return losses, {name: tensor - before[name] for name, tensor in model.gather_weights().items()}

    return on_ranks(ranks, run)


def apart(found: Updates, reference: Updates) -> float:
    noise = sum(float((found[name] - reference[name]).double().square().sum()) for name in reference)
    return (noise / sum(float(item.double().square().sum()) for item in reference.values())) ** 0.5


@pytest.mark.parametrize("config", [GPT2, LLAMA], ids=["gpt2", "llama"])
@pytest.mark.parametrize("kind", [tensor_parallel.TensorCut, tensor_parallel.SequenceCut])
def test_two_ranks_train_as_one(kind: type[tensor_parallel.TensorCut], config: GPTConfig) -> None:
    losses, reference = trained_alone(config, "fp32")
    for ranks in (2, 4) if config is GPT2 else (2,):
        result = trained_by(kind, config, "fp32", ranks)
        assert result[0][0] == result[1][0] == pytest.approx(losses, abs=2e-6)
        for _, updates in result:
            assert list(updates) == list(reference) and apart(updates, reference) < 1e-5


@pytest.mark.parametrize("mode", ["fp8", "fp8-delayed:history=2"])
def test_scales_of_the_group_are_those_of_one_rank(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    _, reference = trained_alone(GPT2, mode)

    def distance(amax: str) -> float:
        return apart(trained_by(tensor_parallel.TensorCut, GPT2, mode, 2, amax)[0][1], reference)

    assert distance("group") < 1e-5 and (own := distance("own")) > 0.01
    asked = ThreadedGroup.max_over_ranks
    monkeypatch.setattr(ThreadedGroup, "max_over_ranks", lambda self, x: asked(self, x) / (16 if self.rank else 1))
    assert distance("group") > 3 * own


@pytest.mark.parametrize("kind", [RecipeArithmetic, ScaledArithmetic])
@pytest.mark.parametrize("mode", ["fp8", "fp8:scale=pow2", "fp8-delayed:history=2"])
def test_parts_are_cast_as_the_whole_tensor_is(kind: type[RecipeArithmetic], mode: str) -> None:
    recipe = get_recipe(precisions.get(mode))
    torch.manual_seed(0)
    steps = [torch.cat([torch.randn(8, 32), 7 * torch.randn(8, 32)]) for _ in range(3)]
    amax = iter(())

    def max_over_ranks(own: Tensor) -> Tensor:
        assert own.dim() == 0 and own.dtype == torch.float32
        return next(amax)

    for role in Role:
        whole, own, *parts = (kind(recipe).layer("a") for _ in range(4))
        ranks = [tensor_parallel.use_group_scales(part, Role, max_over_ranks) for part in parts]
        alike = []
        for step in steps:
            straight, turned = whole.cast_both(step, role)
            for place, (rank, part) in enumerate(zip(ranks, step.chunk(2), strict=True)):
                amax = iter([largest_magnitude(step)])
                result, other = rank.cast_both(part, role)
                rows = slice(8 * place, 8 * place + 8)
                assert torch.equal(result.data.float(), straight.data[rows].float())
                assert turned is not None and other is not None
                assert torch.equal(other.data.float(), turned.data[:, rows].float())
            alike.append(torch.equal(own.cast(step[:8], role).data.float(), straight.data[:8].float()))
        assert not all(alike) or "pow2" in mode  # under powers of two values are rounded alike


def test_a_cast_that_is_done_again_asks_nobody() -> None:
    asked = []
    plain = RecipeArithmetic(get_recipe(precisions.get("fp8")))
    arithmetic = tensor_parallel.use_group_scales(plain, Role, lambda amax: asked.append(amax) or amax * 2)
    assert isinstance(arithmetic, RecipeArithmetic)
    x = torch.randn(4, 16)
    first, again = (arithmetic.operand(x, Role.INPUT, repeat=again) for again in (False, True))
    assert len(asked) == 1 and torch.equal(first.data, again.data)
    scale = arithmetic.last_scale(Role.INPUT)
    assert scale is not None and float(scale) == pytest.approx(448 / (2 * float(x.abs().max())))


def test_scales_of_rows_and_blocks_are_of_one_ranks_values() -> None:
    for mode in ("fp8-rowwise", "mxfp8", "nvfp4"):
        arithmetic = RecipeArithmetic(get_recipe(precisions.get(mode)))
        assert tensor_parallel.use_group_scales(arithmetic, Role, lambda amax: amax) is arithmetic


NANO = SIZES["nano"]
GROUPED = replace(NANO, is_llama_like=True, key_heads=2)


@for_each(("config", "ranks"), [(NANO, 2), (NANO, 4), (GROUPED, 2)])
def test_shares_make_up_the_whole(config: GPTConfig, ranks: int) -> None:
    for path, cut in list_weight_cuts(config).items():
        outputs, inputs = list_features(config)[path.split(".")[1]]
        whole = torch.arange(outputs * inputs).view(outputs, inputs)
        shares = [cut.share(whole, rank, ranks) for rank in range(ranks)]
        assert torch.equal(cut.join(shares), whole)
        assert {item.numel() for item in shares} == {whole.numel() // ranks}


def refusal(
    way: str, mode: str = "fp32", ranks: int = 2, config: GPTConfig = NANO, batch: int = 8, **options: str
) -> str:
    return WAYS[way].explain_impossible_case(ParallelCase(config, batch, ranks, precisions.get(mode), options, CPU))


def test_what_cannot_be_cut_is_refused_with_the_number() -> None:
    three = replace(NANO, layers=3)
    reference = {
        refusal("tp", ranks=3, amax="own"): "4 heads have no equal share for each of 3 ranks",
        refusal("tp", config=GROUPED, ranks=4, amax="own"): "2 heads of keys have no equal share for each of 4",
        refusal("sp", config=replace(NANO, sequence=97), amax="own"): "97 tokens have no equal share for each of 2",
        refusal("tp", config=replace(NANO, experts=4), amax="own"): "tensor parallelism cannot divide experts",
        refusal("tp", mode="mxfp8", amax="group"): "mxfp8 has no tensor scale that ranks could share",
        refusal("tp_fsdp", ranks=4, batch=7, amax="own"): "7 sequences have no equal share for each pair of 4 ranks",
        refusal("pp_gpipe", config=three, microbatches="2"): "3 layers have no equal share for each of 2 ranks",
        refusal("pp_gpipe", batch=6, microbatches="4"): "6 sequences cannot be cut into 4 equal microbatches",
        refusal("pp_1f1b", ranks=2, microbatches="1"): "1 microbatches do not fill 2 stages by this schedule",
    }
    for result, start in reference.items():
        assert result.startswith(start), (result, start)
