"""Feed-forward blocks of many experts, of which each token goes through a few, and models made of such blocks.

The router is computed in fp32, so that its choices do not depend on how products are rounded. As in Mixtral, chosen
experts are weighed by the softmax of their scores. Tokens are sorted by expert and never dropped. Each expert's
products run in its own arithmetic; where all experts share one that can, they are one grouped product. The balancing
loss is Switch's.

In a `Mixture` the case also sets the load and what travels: a token's rows go to its experts (dispatch), through two
products of each, and back, weighed (combine). With a planned load the host knows the sizes before the step and waits
for nothing; with the router's own choices it waits for each expert's number of tokens. The weights of the combination
are the router's in both cases. Rows travel in the carrier, in bf16, or as E4M3 codes with a scale for 128 elements of a
row; gradients travel in the carrier.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fp8bench.nn.around import cast_to, start_stream
from fp8bench.nn.gpt import GPT, FeedForward, Norm
from fp8bench.nn.linear import Choose, Linear, grouped_linear, linear, scoped
from fp8bench.nn.sizes import CHOSEN, GPTConfig, MoeSizes
from fp8bench.protocols import Arithmetic, Phases, Role

# The weight of the balancing loss in Switch and Mixtral.
BALANCE = 0.01
# Native weight gradients contract over an expert's tokens in multiples of this; zeros fill them up.
ROWS = 32


def counts_on_host(counts: Tensor) -> list[int]:
    """The number of tokens of each expert. This is the one point in a layer where the host waits."""
    loads: list[int] = counts.tolist()
    return loads


def routed(
    x: Tensor, router: Tensor, top_k: int, path: str, through: Callable[[Tensor, str], Tensor]
) -> tuple[Tensor, list[int]]:
    """Experts of a served model: the weighed outputs of `through(rows, "path.N")`, and the tokens of each expert.

    Experts run one after the other, whatever their weights' format, without padding, and only those that are chosen.
    """
    flat, wide = x.reshape(-1, x.shape[-1]), torch.promote_types(x.dtype, torch.float32)
    best, chosen = F.linear(flat.to(wide), router.to(wide)).topk(top_k)
    loads = counts_on_host((chosen.view(-1, 1) == torch.arange(len(router), device=x.device)).sum(0))
    order = chosen.flatten().argsort(stable=True)
    parts = enumerate(torch.split_with_sizes(flat[order // top_k], loads))
    done = torch.cat([through(rows, f"{path}.{number}") for number, rows in parts if len(rows)])
    back = done[order.argsort()].view(len(flat), top_k, -1)
    return (back.to(wide) * best.softmax(-1)[..., None]).sum(1).to(x.dtype).view(x.shape), loads


class Experts(nn.Module):
    """`balance` is the balancing loss of the last pass: 1 if all experts are chosen equally often, more otherwise.

    `ahead` holds each token's experts where the load is planned; `count` is the number of experts on all ranks. With
    `fills_empty` an expert without tokens multiplies zeros, so that its weights have gradients (of zero).
    """

    experts: Sequence[FeedForward]
    fills_empty = True
    ahead: Tensor | None = None
    ranks = 1

    def __init__(self, width: int, count: int, expert: Callable[[Choose], FeedForward], choose: Choose) -> None:
        super().__init__()
        self.router = nn.Parameter(torch.randn(count, width) * 0.02)
        made = [expert(scoped(choose, f"experts.{number}")) for number in range(count)]
        self.experts = nn.ModuleList(made)  # type: ignore[assignment]
        self.count = count
        self.balance: Tensor | None = None

    def forward(self, x: Tensor, phase: Phases) -> Tensor:
        flat = x.reshape(-1, x.shape[-1])
        scores = F.linear(flat.to(self.router.dtype), self.router)
        best, chosen = self._choice(scores)
        every = torch.arange(self.count, device=x.device)
        counts = (chosen.view(-1, 1) == every).sum(0)  # bincount would make the host wait
        shares = self._counts_of_all_ranks(counts).to(scores.dtype) / (chosen.numel() * self.ranks)
        self.balance = self.count * (shares * scores.softmax(-1).mean(0)).sum()
        order = chosen.flatten().argsort(stable=True)
        rows = flat[:, None].expand(-1, CHOSEN, -1).reshape(-1, flat.shape[-1])[order]
        rows_back = self._through_experts(rows, counts, phase)[order.argsort()].view(len(flat), CHOSEN, -1)
        weights = best.softmax(-1)[..., None]
        return (rows_back.to(weights.dtype) * weights).sum(1).to(x.dtype).view(x.shape)

    def _choice(self, scores: Tensor) -> tuple[Tensor, Tensor]:
        if self.ahead is None:
            best, chosen = scores.topk(CHOSEN)
            return best, chosen
        chosen = self.ahead[: len(scores)]
        return scores.gather(1, chosen), chosen

    def _counts_of_all_ranks(self, counts: Tensor) -> Tensor:
        return counts

    def _through_experts(self, rows: Tensor, counts: Tensor, phase: Phases) -> Tensor:
        return torch.cat(self._each(torch.split_with_sizes(rows, self._counts_on_host(counts)), counts, phase))

    _counts_on_host = staticmethod(counts_on_host)

    def _each(self, parts: Sequence[Tensor], counts: Tensor, phase: Phases) -> list[Tensor]:
        grouped = self._can_be_grouped()
        rows = self._rows(grouped)
        least = rows if self.fills_empty else 0
        sizes = [max(least, -(-len(part) // rows) * rows) for part in parts]
        filled = [F.pad(part, (0, 0, 0, size - len(part))) for part, size in zip(parts, sizes, strict=True)]
        if grouped:
            counts = counts.clamp(min=1) if self.fills_empty else counts
            ends = ((counts + rows - 1) // rows * rows).cumsum(0).to(torch.int32)
            outputs = torch.split_with_sizes(self._grouped(torch.cat(filled), sizes, ends, phase), sizes)
        else:
            pairs = zip(self.experts, filled, strict=True)
            outputs = tuple(expert(part, phase) if len(part) else _empty_pass(expert, part) for expert, part in pairs)
        return [y[: len(part)] for y, part in zip(outputs, parts, strict=True)]

    def _rows(self, grouped: bool) -> int:
        return self.experts[0].up.arithmetic.part_rows if grouped else ROWS

    def _can_be_grouped(self) -> bool:
        layers = [layer for expert in self.experts for layer in (expert.up, expert.down)]
        common = layers[0].arithmetic
        sides = (side for layer in layers[:2] for side in layer.weight.shape)
        alike = all(layer.arithmetic is common for layer in layers)
        return common.groups > 0 and alike and not any(side % common.groups for side in sides)

    def _grouped(self, x: Tensor, sizes: list[int], ends: Tensor, phase: Phases) -> Tensor:
        arithmetic = self.experts[0].up.arithmetic

        def through(x: Tensor, layers: list[Linear]) -> Tensor:
            weights, given = [layer.weight for layer in layers], [layer.operands for layer in layers]
            return grouped_linear(x, weights, sizes, ends, arithmetic, phase, given)

        hidden = self.experts[0].between(through(x, [expert.up for expert in self.experts]))
        return through(hidden, [expert.down for expert in self.experts])


def _empty_pass(expert: FeedForward, part: Tensor) -> Tensor:
    """Passes no rows through the weights all the same, so that they get gradients."""
    wide = part.to(expert.up.weight.dtype)
    return F.linear(expert.between(F.linear(wide, expert.up.weight)), expert.down.weight).to(part.dtype)


class MixtureGPT(GPT):
    """A GPT with experts for feed-forward blocks. The balancing loss enters the gradients, not the loss's value."""

    leaves = True

    def __init__(self, config: GPTConfig, choose: Choose, carrier: torch.dtype, **options: Any) -> None:
        super().__init__(config, choose, carrier, feed_forward=_experts, **options)

    def forward(self, tokens: Tensor, targets: Tensor, phase: Phases, reduction: str = "mean") -> Tensor:
        loss = super().forward(tokens, targets, phase, reduction)
        parts = [
            module.balance for module in self.modules() if isinstance(module, Experts) and module.balance is not None
        ]
        for module in self.modules():
            if isinstance(module, Experts):
                module.balance = None
        if reduction != "mean" or not self.training:
            return loss
        balance = BALANCE * torch.stack(parts).sum()
        return loss + (balance - balance.detach())


def _experts(config: GPTConfig, gain: float, choose: Choose) -> nn.Module:
    def expert(own: Choose) -> FeedForward:
        return FeedForward(config.width, config.hidden, config.modern, gain, own)

    return Experts(config.width, config.experts, expert, choose)


_BLOCK = 128
_E4M3 = torch.float8_e4m3fn


@dataclass(frozen=True)
class Travel:
    """How rows travel to experts and back, the router's arithmetic, and the multiple that parts are padded to."""

    dispatch: str
    combine: str
    router: Arithmetic
    rows: int


def draw_load(load: str, tokens: int, sizes: MoeSizes, seed: int) -> Tensor | None:
    """Each token's experts: round robin, or distinct ones by a Zipf law; None where the router chooses.

    Drawn on the host from the seed alone: the same for every precision and device.
    """
    if load == "router":
        return None
    if load == "uniform":
        return torch.arange(tokens * sizes.top_k).view(tokens, sizes.top_k) % sizes.experts
    generator = torch.Generator("cpu").manual_seed(seed)
    ranks = torch.arange(1, sizes.experts + 1, dtype=torch.float64, device="cpu")
    noise = torch.rand(tokens, sizes.experts, dtype=torch.float64, generator=generator, device="cpu")
    # Gumbel's trick: the largest keys are draws without replacement by the Zipf weights.
    keys = -float(load.removeprefix("zipf:")) * ranks.log() - (-noise.clamp(min=1e-300).log()).log()
    return keys.topk(sizes.top_k).indices


def encode_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    block = _BLOCK if x.shape[1] % _BLOCK == 0 else x.shape[1]
    parts = x.float().view(len(x), x.shape[1] // block, block)
    scale = parts.abs().amax(-1, keepdim=True).clamp(min=1e-30) / torch.finfo(_E4M3).max
    return (parts / scale).to(_E4M3).view(torch.uint8), scale


def decode_rows(codes: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    return (codes.view(_E4M3).float() * scale).flatten(1).to(dtype)


def set_load(model: nn.Module, load: str, tokens: int, seed: int) -> None:
    blocks = [block for block in model.modules() if isinstance(block, Experts)]
    for number, block in enumerate(blocks):
        width = block.router.shape[1]
        plan = draw_load(load, tokens, MoeSizes(width, width, block.count, CHOSEN), seed + number)
        block.ahead = None if plan is None else plan.to(block.router.device)


class _Transported(torch.autograd.Function):
    """Rows of x by number, in the format that they travel in; gradients return in their own dtype."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, numbers: Tensor, way: str) -> Tensor:
        ctx.save_for_backward(numbers)
        ctx.rows = len(x)
        if way == "carrier":
            return x[numbers]
        if way == "bf16":
            return x.to(torch.bfloat16)[numbers].to(x.dtype)
        codes, scale = encode_rows(x)
        return decode_rows(codes[numbers], scale[numbers], x.dtype)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (numbers,) = ctx.saved_tensors
        back = gradients[0].new_zeros(ctx.rows, gradients[0].shape[1])
        return back.index_add_(0, numbers, gradients[0]), None, None


def transported(x: Tensor, numbers: Tensor, way: str) -> Tensor:
    rows: Tensor = _Transported.apply(x, numbers, way)  # type: ignore[no-untyped-call]
    return rows


class LoadedExperts(Experts):
    """In a pass that is `watched`, `seen` keeps the router's choices and the number of tokens of each expert."""

    fills_empty = False
    plan: Tensor | None

    def __init__(self, sizes: MoeSizes, plan: Tensor | None, travel: Travel, choose: Choose) -> None:
        def expert(own: Choose) -> FeedForward:
            return FeedForward(sizes.width, sizes.hidden, True, 1.0, own)

        super().__init__(sizes.width, sizes.experts, expert, choose)
        # Scores of order one: smaller ones would weigh all experts alike.
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
        sizes = self._planned if self._planned is not None else self._counts_on_host(counts)
        if self.watched:
            self.seen = scores.detach().topk(self.top_k).indices, sizes
        order = chosen.flatten().argsort(stable=True)
        rows = transported(x, order // self.top_k, self.travel.dispatch)
        outputs = torch.cat(self._each(torch.split_with_sizes(rows, sizes), counts, phase))
        back = transported(outputs, order.argsort(), self.travel.combine).view(len(x), self.top_k, -1)
        weights = scores.gather(1, chosen).softmax(-1)[..., None]
        return (back.to(weights.dtype) * weights).sum(1).to(x.dtype)

    def _rows(self, grouped: bool) -> int:
        arithmetic = self.experts[0].up.arithmetic
        # Only the weight gradient contracts over rows: forward alone needs no multiple for plain products.
        multiple = arithmetic.groups if torch.is_grad_enabled() else 1
        least = 1 if not grouped else multiple if arithmetic.plain else arithmetic.part_rows
        return max(self.travel.rows, least)


class Mixture(nn.Module):
    """Layers of experts, each behind a norm and with a residual."""

    around: Mapping[str, Arithmetic | None] = dict.fromkeys(("residual",))

    def __init__(
        self, sizes: MoeSizes, plans: Sequence[Tensor | None], travel: Travel, choose: Choose
    ) -> None:  # fmt: skip
        super().__init__()
        self.norms = nn.ModuleList(Norm(sizes.width, True) for _ in plans)
        self.blocks = nn.ModuleList(
            LoadedExperts(sizes, plan, travel, scoped(choose, f"blocks.{number}")) for number, plan in enumerate(plans)
        )

    def forward(self, x: Tensor, phase: Phases) -> Tensor:
        given, residual = x.dtype, self.around["residual"]
        x = start_stream(x, given, residual)
        for norm, block in zip(self.norms, self.blocks, strict=True):
            x = cast_to(x + block(norm(x), phase).to(x.dtype), residual)
        return x.to(given)

    def bytes_each(self) -> int:
        layers = [layer for layer in self.modules() if isinstance(layer, Linear)][:2]
        operands = [
            layer.operands[0] if layer.operands else layer.arithmetic.cast(layer.weight.detach(), Role.WEIGHT)
            for layer in layers
        ]
        return sum(
            tensor.nbytes for operand in operands for tensor in (operand.data, operand.scale) if tensor is not None
        )

    def watch(self, run: Callable[[], object]) -> list[tuple[Tensor, list[int]]]:
        """Calls `run`; returns each layer's choices of its router, and the number of tokens of each expert."""
        blocks = [block for block in self.blocks if isinstance(block, LoadedExperts)]
        for block in blocks:
            block.watched = True
        run()
        for block in blocks:
            block.watched = False
        return [block.seen for block in blocks]


def disagreements(seen: Sequence[Tensor], exact: Sequence[Tensor]) -> list[float]:
    """For each layer the share of choices that the exact pass does not make, in any order."""
    return [
        float(1 - (ours[:, :, None] == theirs[:, None, :]).any(-1).double().mean())
        for ours, theirs in zip(seen, exact, strict=True)
    ]


def load_figures(counts: Sequence[Sequence[int]], expert_bytes: int) -> dict[str, float]:
    """Over all layers: the unevenness, the experts with any token and their bytes, and rows per expert in use."""
    used = [rows for layer in counts for rows in layer if rows]
    return {
        "load_ratio": max(max(layer) * len(layer) / sum(layer) for layer in counts),
        "distinct_experts": float(len(used)), "expert_bytes": float(len(used) * expert_bytes),
        "rows_least": float(min(used)), "rows_median": float(median(used)),
    }  # fmt: skip
