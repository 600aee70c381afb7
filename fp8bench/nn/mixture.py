"""Blocks of experts whose load, and what travels to and from them, a case sets.

A token's rows go to its experts (dispatch), through two products of each expert, and back, weighed (combine). With a
load that is made, who goes where is known before the step, and the host waits for nothing; with the router's own it
waits for how many tokens each expert has. Weights of the combination are the router's in either case. Rows travel in
the carrier, in bf16, or as codes of E4M3 with a scale for 128 elements of a row; gradients travel in the carrier.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

from fp8bench.nn.around import held, streamed
from fp8bench.nn.experts import Experts
from fp8bench.nn.gpt import FeedForward, Norm
from fp8bench.nn.linear import Choose, Linear, both_of, linear, within
from fp8bench.nn.sizes import CHOSEN, MoeSizes
from fp8bench.protocols import Arithmetic, Phases, Role

_BLOCK = 128
_E4M3 = torch.float8_e4m3fn


@dataclass(frozen=True)
class Travel:
    """What a case does beside its experts' products: `rows` is the multiple that an expert's part is filled up to."""

    dispatch: str
    combine: str
    router: Arithmetic
    rows: int


def made_load(load: str, tokens: int, sizes: MoeSizes, seed: int) -> Tensor | None:
    """Each token's experts: exactly round robin, or by a Zipf law without an expert twice; None where the router says.

    Made on the host of the seed alone: the same for every precision and device.
    """
    if load == "router":
        return None
    if load == "uniform":
        return torch.arange(tokens * sizes.top_k).view(tokens, sizes.top_k) % sizes.experts
    generator = torch.Generator("cpu").manual_seed(seed)
    ranks = torch.arange(1, sizes.experts + 1, dtype=torch.float64, device="cpu")
    noise = torch.rand(tokens, sizes.experts, dtype=torch.float64, generator=generator, device="cpu")
    # Gumbel's trick: the largest of these are draws by the weights, one after the other.
    keys = -float(load.removeprefix("zipf:")) * ranks.log() - (-noise.clamp(min=1e-300).log()).log()
    return keys.topk(sizes.top_k).indices


def coded(x: Tensor) -> tuple[Tensor, Tensor]:
    """Rows as codes of E4M3 (rows, blocks, 128), a byte each, and the float32 scale of every block."""
    block = _BLOCK if x.shape[1] % _BLOCK == 0 else x.shape[1]
    parts = x.float().view(len(x), x.shape[1] // block, block)
    scale = parts.abs().amax(-1, keepdim=True).clamp(min=1e-30) / torch.finfo(_E4M3).max
    return (parts / scale).to(_E4M3).view(torch.uint8), scale


def decoded(codes: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    return (codes.view(_E4M3).float() * scale).flatten(1).to(dtype)


def load_made(model: nn.Module, load: str, tokens: int, seed: int) -> None:
    """Have who goes where set ahead in all blocks of a model, or left to their routers."""
    blocks = [block for block in model.modules() if isinstance(block, Experts)]
    for number, block in enumerate(blocks):
        width = block.router.shape[1]
        plan = made_load(load, tokens, MoeSizes(width, width, block.count, CHOSEN), seed + number)
        block.ahead = None if plan is None else plan.to(block.router.device)


class _Moved(torch.autograd.Function):
    """Rows of x by their numbers, in the format that they travel in; gradients come back in their own."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, numbers: Tensor, way: str) -> Tensor:
        ctx.save_for_backward(numbers)
        ctx.rows = len(x)
        if way == "carrier":
            return x[numbers]
        if way == "bf16":
            return x.to(torch.bfloat16)[numbers].to(x.dtype)
        codes, scale = coded(x)
        return decoded(codes[numbers], scale[numbers], x.dtype)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (numbers,) = ctx.saved_tensors
        back = gradients[0].new_zeros(ctx.rows, gradients[0].shape[1])
        return back.index_add_(0, numbers, gradients[0]), None, None


def moved(x: Tensor, numbers: Tensor, way: str) -> Tensor:
    """x[numbers], as it is after it has travelled so."""
    rows: Tensor = _Moved.apply(x, numbers, way)  # type: ignore[no-untyped-call]
    return rows


class LoadedExperts(Experts):
    """`seen` are, of the last pass that was watched, the experts that the router chooses and the tokens of each."""

    fills_empty = False
    plan: Tensor | None

    def __init__(self, sizes: MoeSizes, plan: Tensor | None, travel: Travel, choose: Choose) -> None:
        def expert(own: Choose) -> FeedForward:
            return FeedForward(sizes.width, sizes.hidden, True, 1.0, own)

        super().__init__(sizes.width, sizes.experts, expert, choose)
        # Scores of order one: with smaller ones all experts would weigh the same.
        self.router = nn.Parameter(torch.randn(sizes.experts, sizes.width) / sizes.width**0.5)
        self.top_k, self.travel = sizes.top_k, travel
        self.register_buffer("plan", None if plan is None else plan.to(self.router.device))
        self._planned = None if plan is None else plan.flatten().bincount(minlength=sizes.experts).tolist()
        self.watched, self.seen = False, (torch.empty(0), list[int]())

    def forward(self, x: Tensor, phase: Phases) -> Tensor:
        scores = linear(x, self.router, self.travel.router, phase)
        scores = scores.to(torch.promote_types(scores.dtype, torch.float32))
        chosen = scores.topk(self.top_k).indices if self.plan is None else self.plan
        counts = (chosen.view(-1, 1) == torch.arange(len(self.experts), device=x.device)).sum(0)
        sizes = self._planned if self._planned is not None else self._waited_for(counts)
        if self.watched:
            self.seen = scores.detach().topk(self.top_k).indices, sizes
        order = chosen.flatten().argsort(stable=True)
        rows = moved(x, order // self.top_k, self.travel.dispatch)
        outputs = torch.cat(self._each(torch.split_with_sizes(rows, sizes), counts, phase))
        back = moved(outputs, order.argsort(), self.travel.combine).view(len(x), self.top_k, -1)
        weights = scores.gather(1, chosen).softmax(-1)[..., None]
        return (back.to(weights.dtype) * weights).sum(1).to(x.dtype)

    def _rows(self, grouped: bool) -> int:
        arithmetic = self.experts[0].up.arithmetic
        # The weight gradient contracts over a part's rows: forward alone asks plain products for no multiple of them.
        multiple = arithmetic.groups if torch.is_grad_enabled() else 1
        least = 1 if not grouped else multiple if arithmetic.plain else arithmetic.part_rows
        return max(self.travel.rows, least)


class Mixture(nn.Module):
    """Layers of experts one after the other, each behind a norm and with its residual."""

    around: Mapping[str, Arithmetic | None] = dict.fromkeys(("residual",))

    def __init__(
        self, sizes: MoeSizes, plans: Sequence[Tensor | None], travel: Travel, choose: Choose
    ) -> None:  # fmt: skip
        super().__init__()
        self.norms = nn.ModuleList(Norm(sizes.width, True) for _ in plans)
        self.blocks = nn.ModuleList(
            LoadedExperts(sizes, plan, travel, within(choose, f"blocks.{number}")) for number, plan in enumerate(plans)
        )

    def forward(self, x: Tensor, phase: Phases) -> Tensor:
        given, residual = x.dtype, self.around["residual"]
        x = streamed(x, given, residual)
        for norm, block in zip(self.norms, self.blocks, strict=True):
            x = held(x + block(norm(x), phase).to(x.dtype), residual)
        return x.to(given)

    def bytes_each(self) -> int:
        """Of an expert's weights with their scales, as they are multiplied here."""
        layers = [layer for layer in self.modules() if isinstance(layer, Linear)][:2]
        operands = [layer.arithmetic.cast(layer.weight.detach(), Role.WEIGHT) for layer in layers]
        return sum(
            tensor.nbytes for operand in operands for tensor in (operand.data, operand.scale) if tensor is not None
        )

    def watch(self, run: Callable[[], object]) -> list[tuple[Tensor, list[int]]]:
        """What each layer's router chooses while something runs, and how many tokens each expert has."""
        blocks = [block for block in self.blocks if isinstance(block, LoadedExperts)]
        for block in blocks:
            block.watched = True
        run()
        for block in blocks:
            block.watched = False
        return [block.seen for block in blocks]


def cast_once(model: nn.Module) -> None:
    """Have the experts' weights cast ahead of all steps, as who serves a model keeps them."""
    for layer in model.modules():
        if isinstance(layer, Linear) and layer.arithmetic.casts:
            layer.operands = both_of(layer.arithmetic, layer.weight.detach())


def disagreements(seen: Sequence[Tensor], exact: Sequence[Tensor]) -> list[float]:
    """Of each layer, the share of choices that are none of the exact pass's, whatever their order."""
    return [
        float(1 - (ours[:, :, None] == theirs[:, None, :]).any(-1).double().mean())
        for ours, theirs in zip(seen, exact, strict=True)
    ]


def load_figures(counts: Sequence[Sequence[int]], expert_bytes: int) -> dict[str, float]:
    """Of all layers: how uneven, how many experts have any token and what these come to, rows of a group."""
    used = [rows for layer in counts for rows in layer if rows]
    return {
        "load_ratio": max(max(layer) * len(layer) / sum(layer) for layer in counts),
        "distinct_experts": float(len(used)), "expert_bytes": float(len(used) * expert_bytes),
        "rows_least": float(min(used)), "rows_median": float(median(used)),
    }  # fmt: skip
