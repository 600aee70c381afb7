"""Expert parallelism against one rank bit for bit, bytes by hand, and planted mistakes."""

from __future__ import annotations

from dataclasses import dataclass

import ml_dtypes
import numpy as np
import torch
from torch import Tensor

from fp8bench.nn.experts import Experts, draw_expert_load
from fp8bench.nn.parallel.expert_parallel import RankLocalExperts
from fp8bench.nn.sizes import MoeSizes
from fp8bench.protocols import SilentPhases
from fp8bench.registry import precisions
from tests.counts import for_each
from tests.facts import CPU
from tests.nn.parallel.ranks import Place, ThreadedGroup, on_ranks

WIDTH, HIDDEN, EXPERTS, TOKENS = 32, 48, 8, 40
LOADS = ("router", "uniform", "zipf:1", "zipf:4")


def block(precision: str, load: str) -> Experts:
    with torch.random.fork_rng([]):
        torch.manual_seed(1)
        arithmetic = precisions.get(precision).arithmetic(CPU)
        made = Experts(EXPERTS, WIDTH, HIDDEN, True, 1.0, lambda name: arithmetic)
        with torch.no_grad():
            made.router.mul_(20)
    made.planned_experts = draw_expert_load(load, TOKENS, MoeSizes(WIDTH, HIDDEN, EXPERTS, 2), 3)
    return made


@dataclass
class Passed:
    """A pass forward and backward: output, gradients by name, balancing loss, bytes and rows."""

    output: Tensor
    of_input: Tensor
    gradients: dict[str, Tensor]
    balance: float
    sent: int = 0
    rows: tuple[int, ...] = ()


def passed(made: Experts, x: Tensor, pull: Tensor, first: int = 0) -> Passed:
    x = x.clone().requires_grad_()
    output = made(x, SilentPhases())
    (output * pull).sum().backward()
    gradients = {name: parameter.grad for name, parameter in made.named_parameters() if parameter.grad is not None}
    assert x.grad is not None and made.balance is not None
    renamed = {_moved(name, first): gradient for name, gradient in gradients.items()}
    return Passed(output.detach(), x.grad, renamed, float(made.balance.detach()))


def _moved(name: str, first: int) -> str:
    words = name.split(".")
    return ".".join((words[0], str(int(words[1]) + first), *words[2:])) if words[0] == "experts" else name


def tokens() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(5)
    return torch.randn(TOKENS, WIDTH, generator=generator), torch.randn(TOKENS, WIDTH, generator=generator)


def by_ranks(ranks: int, precision: str, load: str, wire: str = "stream") -> list[Passed]:
    x, pull = tokens()
    blocks = [block(precision, load) for _ in range(ranks)]  # threads share one random state

    def one(place: Place) -> Passed:
        group = ThreadedGroup(place)  # type: ignore[arg-type]
        made = RankLocalExperts(blocks[place.number], group, wire)
        result = passed(made, x.chunk(ranks)[place.number], pull.chunk(ranks)[place.number], made.own_experts.start)
        result.sent, result.rows = place.sent, tuple(made.rows)
        return result

    return on_ranks(ranks, one)


def differing(ranks: int, precision: str, load: str, wire: str = "stream") -> set[str]:
    alone, together = passed(block(precision, load), *tokens()), by_ranks(ranks, precision, load, wire)
    gradients = {name: gradient for rank in together for name, gradient in rank.gradients.items()}
    gradients["router"] = sum((rank.gradients["router"] for rank in together), torch.zeros(()))
    missing = gradients.keys() ^ alone.gradients.keys()
    if missing:
        return {*missing}
    router = alone.gradients.pop("router")
    same = {name: torch.equal(gradients[name], gradient) for name, gradient in alone.gradients.items()}
    same["router"] = torch.allclose(gradients["router"], router, rtol=1e-4, atol=1e-5)
    same["output"] = torch.equal(torch.cat([rank.output for rank in together]), alone.output)
    same["input"] = torch.equal(torch.cat([rank.of_input for rank in together]), alone.of_input)
    # Each rank's balancing loss uses the tokens of all ranks, but only its scores.
    same["balance"] = abs(sum(rank.balance for rank in together) / ranks - alone.balance) < 1e-5
    return {name for name, is_same in same.items() if not is_same}


@for_each("load", LOADS)
@for_each("precision", ["fp32", "bf16", "fp8", "mxfp8"])
def test_ranks_compute_what_one_does_bit_for_bit(precision: str, load: str) -> None:
    for ranks in (2, 4, 8) if (precision, load) == ("fp32", "zipf:1") else (2,):
        assert differing(ranks, precision, load) == set()


def rows_to(load: str, ranks: int) -> list[list[int]]:
    plan = draw_expert_load(load, TOKENS, MoeSizes(WIDTH, HIDDEN, EXPERTS, 2), 3)
    assert plan is not None
    result = [[0] * ranks for _ in range(ranks)]
    for token, chosen in enumerate(plan.tolist()):
        for expert in chosen:
            result[token // (TOKENS // ranks)][expert // (EXPERTS // ranks)] += 1
    return result


# Bytes of a row in both directions: in FP8 one byte per element and a four-byte scale; the way back and gradients are
# bf16.
ROW_BYTES = {"stream": (4 * WIDTH, 4 * WIDTH), "bf16": (2 * WIDTH, 2 * WIDTH), "fp8": (WIDTH + 4, 2 * WIDTH)}


@for_each("wire", [*ROW_BYTES])
@for_each("load", ["uniform", "zipf:1"])
def test_bytes_are_counted_by_hand(load: str, wire: str) -> None:
    there, back = ROW_BYTES[wire]
    table = rows_to(load, 2)
    for rank, result in enumerate(by_ranks(2, "fp32", load, wire)):
        out, come = table[rank][1 - rank], table[1 - rank][rank]
        gradients = back if wire == "fp8" else there
        assert result.sent == out * there + come * back + come * gradients + out * back
        assert result.rows == tuple(table[0][owner] + table[1][owner] for owner in range(2))


def test_rows_travel_in_the_bits_that_the_wire_says() -> None:
    x, _ = tokens()
    blocks = [block("fp32", "uniform") for _ in range(2)]

    def given(wire: str) -> Tensor:
        def one(place: Place) -> Tensor:
            group = ThreadedGroup(place)  # type: ignore[arg-type]
            made = RankLocalExperts(blocks[place.number], group, wire)
            return made._exchange(x.chunk(2)[place.number], [10, 10], [10, 10], wire)

        return torch.cat(on_ranks(2, one))

    seen = {wire: given(wire) for wire in ROW_BYTES}
    order = [*range(10), *range(20, 30), *range(10, 20), *range(30, 40)]
    rows = x[order].numpy()
    scale = (np.abs(rows).max(1, keepdims=True) / np.float32(448)).astype(np.float32)
    codes = (rows / scale).astype(ml_dtypes.float8_e4m3fn).astype(np.float32)
    assert torch.equal(seen["stream"], x[order])
    assert np.array_equal(seen["bf16"].numpy(), rows.astype(ml_dtypes.bfloat16).astype(np.float32))
    assert np.array_equal(seen["fp8"].numpy(), codes * scale)
