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

from fp8bench.nn.around import cast_to, start_stream, wide_dtype
from fp8bench.nn.linear import Choose, Linear, grouped_linear, linear, prefix_names
from fp8bench.nn.parts import FeedForward, Norm
from fp8bench.nn.sizes import CHOSEN, MoeSizes
from fp8bench.protocols import Arithmetic, Phases, Role

# The weight of the balancing loss in Switch and Mixtral.
BALANCE = 0.01
# Native weight gradients contract over an expert's tokens in multiples of this; zeros fill them up.
ROWS = 32


def counts_on_host(counts: Tensor) -> list[int]:
    """The number of tokens of each expert. This is the one point in a layer where the host waits."""
    return counts.tolist()


def count_tokens(chosen: Tensor, experts: int) -> Tensor:
    """The number of tokens of each expert, without bincount, which would make the host wait."""
    numbers = torch.arange(experts, device=chosen.device)
    return (chosen.view(-1, 1) == numbers).sum(0)


def combine(rows: Tensor, scores: Tensor) -> Tensor:
    """Sum each token's rows, (tokens, experts, width), weighed by the softmax of its experts' scores."""
    weights = scores.softmax(-1)[..., None]
    return (rows.to(weights.dtype) * weights).sum(1)


class ServedExperts:
    """Runs a served model's experts one after the other, in any format of weights; `loads` are their last tokens.

    Rows are not padded, and only experts with tokens run.
    """

    def __init__(self, router: Tensor, experts: Sequence[Callable[..., Tensor]], top_k: int) -> None:
        self.router = router
        self.experts = experts
        self.top_k = top_k
        self.loads: list[int] = []

    def __call__(self, x: Tensor, phase: Phases) -> Tensor:
        flat = x.reshape(-1, x.shape[-1])
        wide = wide_dtype(x.dtype)
        scores, chosen = F.linear(flat.to(wide), self.router.to(wide)).topk(self.top_k)
        # The host has to know how many tokens each expert gets, which waits for the device.
        self.loads = counts_on_host(count_tokens(chosen, len(self.router)))
        # Sorted by expert, the rows of each lie together; the inverse order brings them back.
        order = chosen.flatten().argsort(stable=True)
        parts = torch.split_with_sizes(flat[order // self.top_k], self.loads)
        pairs = zip(self.experts, parts, strict=True)
        outputs = torch.cat([expert(rows, phase) for expert, rows in pairs if len(rows)])
        rows = outputs[order.argsort()].view(len(flat), self.top_k, -1)
        return combine(rows, scores).to(x.dtype).view(x.shape)


class Experts(nn.Module):
    """`balance` is the balancing loss of the last pass: 1 if all experts are chosen equally often, more otherwise.

    `ahead` holds each token's experts where the load is planned; `count` is the number of experts on all ranks. With
    `fills_empty` an expert without tokens multiplies zeros, so that its weights have gradients (of zero).
    """

    experts: Sequence[FeedForward]
    fills_empty = True
    ahead: Tensor | None = None
    ranks = 1

    def __init__(self, count: int, width: int, hidden: int, gated: bool, gain: float, choose: Choose) -> None:
        super().__init__()
        self.router = nn.Parameter(torch.randn(count, width) * 0.02)
        scopes = [prefix_names(choose, f"experts.{number}") for number in range(count)]
        experts = nn.ModuleList(FeedForward(width, hidden, gated, gain, scope) for scope in scopes)
        self.experts = experts  # type: ignore[assignment]
        self.count = count
        self.balance: Tensor | None = None

    def forward(self, x: Tensor, phase: Phases) -> Tensor:
        # 1. The router scores each token and chooses its experts, or a plan does.
        flat = x.reshape(-1, x.shape[-1])
        scores = F.linear(flat.to(self.router.dtype), self.router)
        chosen_scores, chosen = self._choose(scores)

        # 2. Experts that get more tokens than others should become less likely.
        counts = count_tokens(chosen, self.count)
        shares = self._sum_over_ranks(counts).to(scores.dtype) / (chosen.numel() * self.ranks)
        self.balance = self.count * (shares * scores.softmax(-1).mean(0)).sum()

        # 3. Tokens are sorted by expert, go through them, and come back in their own order.
        order = chosen.flatten().argsort(stable=True)
        rows = flat[:, None].expand(-1, CHOSEN, -1).reshape(-1, flat.shape[-1])[order]
        outputs = self._run_experts(rows, counts, phase)[order.argsort()].view(len(flat), CHOSEN, -1)
        return combine(outputs, chosen_scores).to(x.dtype).view(x.shape)

    def _choose(self, scores: Tensor) -> tuple[Tensor, Tensor]:
        if self.ahead is None:
            return scores.topk(CHOSEN)
        chosen = self.ahead[: len(scores)]
        return scores.gather(1, chosen), chosen

    def _sum_over_ranks(self, counts: Tensor) -> Tensor:
        return counts

    def _run_experts(self, rows: Tensor, counts: Tensor, phase: Phases) -> Tensor:
        parts = torch.split_with_sizes(rows, counts_on_host(counts))
        return torch.cat(self._run_parts(parts, counts, phase))

    def _run_parts(self, parts: Sequence[Tensor], counts: Tensor, phase: Phases) -> list[Tensor]:
        """Returns the outputs of each expert for its part of the rows."""
        # 1. Fill each part up with zeros to what products contract in multiples of.
        grouped = self._are_groupable()
        multiple = self._row_multiple(grouped)
        least = multiple if self.fills_empty else 0
        sizes = [max(least, -(-len(part) // multiple) * multiple) for part in parts]
        filled = [F.pad(part, (0, 0, 0, size - len(part))) for part, size in zip(parts, sizes, strict=True)]

        # 2. Multiply all parts in one grouped product, or expert by expert.
        outputs: Sequence[Tensor]
        if grouped:
            counts = counts.clamp(min=1) if self.fills_empty else counts
            ends = ((counts + multiple - 1) // multiple * multiple).cumsum(0).to(torch.int32)
            first = self.experts[0]

            def multiply(x: Tensor, layers: list[Linear]) -> Tensor:
                weights = [layer.weight for layer in layers]
                operands = [layer.operands for layer in layers]
                return grouped_linear(x, weights, sizes, ends, first.up.arithmetic, phase, operands)

            hidden = first.activate(multiply(torch.cat(filled), [expert.up for expert in self.experts]))
            outputs = multiply(hidden, [expert.down for expert in self.experts]).split_with_sizes(sizes)
        else:
            pairs = zip(self.experts, filled, strict=True)
            outputs = [expert(part, phase) if len(part) else _pass_no_rows(expert, part) for expert, part in pairs]
        return [y[: len(part)] for y, part in zip(outputs, parts, strict=True)]

    def _row_multiple(self, grouped: bool) -> int:
        return self.experts[0].up.arithmetic.part_rows if grouped else ROWS

    def _are_groupable(self) -> bool:
        """Whether all experts share one arithmetic that multiplies in groups, and fit its multiples."""
        first = self.experts[0]
        common = first.up.arithmetic
        layers = [expert.up for expert in self.experts] + [expert.down for expert in self.experts]
        if common.groups <= 0 or any(layer.arithmetic is not common for layer in layers):
            return False
        return not any(side % common.groups for side in (*first.up.weight.shape, *first.down.weight.shape))


def _pass_no_rows(expert: FeedForward, part: Tensor) -> Tensor:
    """Pass no rows through the weights, so that these get gradients."""
    wide = part.to(expert.up.weight.dtype)
    return F.linear(expert.activate(F.linear(wide, expert.up.weight)), expert.down.weight).to(part.dtype)


def add_balance(loss: Tensor, experts: Sequence[Experts], is_trained: bool) -> Tensor:
    """Add the gradients of the balancing losses, which are forgotten, to a loss that is trained; keep its value."""
    balances = [layer.balance for layer in experts if layer.balance is not None]
    for layer in experts:
        layer.balance = None
    if not is_trained:
        return loss
    balance = BALANCE * torch.stack(balances).sum()
    return loss + (balance - balance.detach())


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


class _Transport(torch.autograd.Function):
    """Rows of x by number, in the format that they travel in; gradients return in their own dtype."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, numbers: Tensor, wire: str) -> Tensor:
        ctx.save_for_backward(numbers)
        ctx.rows = len(x)
        if wire == "carrier":
            return x[numbers]
        if wire == "bf16":
            return x.to(torch.bfloat16)[numbers].to(x.dtype)
        codes, scale = encode_rows(x)
        return decode_rows(codes[numbers], scale[numbers], x.dtype)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (numbers,) = ctx.saved_tensors
        back = gradients[0].new_zeros(ctx.rows, gradients[0].shape[1])
        return back.index_add_(0, numbers, gradients[0]), None, None


def transport(x: Tensor, numbers: Tensor, wire: str) -> Tensor:
    return _Transport.apply(x, numbers, wire)  # type: ignore[no-untyped-call]


class LoadedExperts(Experts):
    """In a pass that is `watched`, `seen` keeps the router's choices and the number of tokens of each expert."""

    fills_empty = False
    plan: Tensor | None

    def __init__(self, sizes: MoeSizes, plan: Tensor | None, travel: Travel, choose: Choose) -> None:
        super().__init__(sizes.experts, sizes.width, sizes.hidden, True, 1.0, choose)
        # Scores of order one: smaller ones would weigh all experts alike.
        self.router = nn.Parameter(torch.randn(sizes.experts, sizes.width) / sizes.width**0.5)
        self.top_k = sizes.top_k
        self.travel = travel
        self.register_buffer("plan", None if plan is None else plan.to(self.router.device))
        self._planned_sizes = None if plan is None else plan.flatten().bincount(minlength=sizes.experts).tolist()
        self.watched = False
        self.seen = (torch.empty(0), list[int]())

    def forward(self, x: Tensor, phase: Phases) -> Tensor:
        # 1. The router scores each token and chooses its experts, or a plan does.
        scores = linear(x, self.router, self.travel.router, phase)
        scores = scores.to(wide_dtype(scores.dtype))
        chosen = scores.topk(self.top_k).indices if self.plan is None else self.plan
        counts = count_tokens(chosen, len(self.experts))
        sizes = counts_on_host(counts) if self._planned_sizes is None else self._planned_sizes
        if self.watched:
            self.seen = scores.detach().topk(self.top_k).indices, sizes

        # 2. Rows travel to their experts, sorted by these, and back.
        order = chosen.flatten().argsort(stable=True)
        rows = transport(x, order // self.top_k, self.travel.dispatch)
        outputs = torch.cat(self._run_parts(torch.split_with_sizes(rows, sizes), counts, phase))
        back = transport(outputs, order.argsort(), self.travel.combine).view(len(x), self.top_k, -1)
        return combine(back, scores.gather(1, chosen)).to(x.dtype)

    def _row_multiple(self, grouped: bool) -> int:
        arithmetic = self.experts[0].up.arithmetic
        if not grouped:
            least = 1
        elif not arithmetic.plain:
            least = arithmetic.part_rows
        else:
            # Only the weight gradient contracts over rows: forward alone needs no multiple for plain products.
            least = arithmetic.groups if torch.is_grad_enabled() else 1
        return max(self.travel.rows, least)


class Mixture(nn.Module):
    """Layers of experts, each behind a norm and with a residual."""

    around: Mapping[str, Arithmetic | None] = dict.fromkeys(("residual",))
    blocks: Sequence[LoadedExperts]

    def __init__(self, sizes: MoeSizes, plans: Sequence[Tensor | None], travel: Travel, choose: Choose) -> None:
        super().__init__()
        self.norms = nn.ModuleList(Norm(sizes.width, True) for _ in plans)
        scopes = [prefix_names(choose, f"blocks.{number}") for number in range(len(plans))]
        layers = [LoadedExperts(sizes, plan, travel, scope) for plan, scope in zip(plans, scopes, strict=True)]
        self.blocks = nn.ModuleList(layers)  # type: ignore[assignment]

    def forward(self, x: Tensor, phase: Phases) -> Tensor:
        dtype = x.dtype
        residual = self.around["residual"]
        x = start_stream(x, dtype, residual)
        for norm, block in zip(self.norms, self.blocks, strict=True):
            x = cast_to(x + block(norm(x), phase).to(x.dtype), residual)
        return x.to(dtype)

    def expert_bytes(self) -> int:
        """Returns the bytes of one expert's weights in the format of its products."""
        expert = self.blocks[0].experts[0]
        total = 0
        for layer in (expert.up, expert.down):
            cast = layer.operands or (layer.arithmetic.cast(layer.weight.detach(), Role.WEIGHT),)
            total += sum(tensor.nbytes for tensor in cast[0].tensors)
        return total

    def watch(self, run: Callable[[], object]) -> list[tuple[Tensor, list[int]]]:
        """Calls `run`; returns each layer's choices of its router, and the number of tokens of each expert."""
        for block in self.blocks:
            block.watched = True
        run()
        for block in self.blocks:
            block.watched = False
        return [block.seen for block in self.blocks]


def disagreements(choices: Sequence[Tensor], exact_choices: Sequence[Tensor]) -> list[float]:
    """For each layer the share of choices that the exact pass does not make, in any order."""
    shares = []
    for chosen, exact in zip(choices, exact_choices, strict=True):
        agrees = (chosen[:, :, None] == exact[:, None, :]).any(-1)
        shares.append(float(1 - agrees.double().mean()))
    return shares


def load_figures(counts: Sequence[Sequence[int]], expert_bytes: int) -> dict[str, float]:
    """Over all layers: the unevenness, the experts with any token and their bytes, and rows per expert in use."""
    used: list[int] = []
    unevenness = 0.0
    for layer in counts:
        used += filter(None, layer)
        unevenness = max(unevenness, max(layer) * len(layer) / sum(layer))
    return {
        "load_ratio": unevenness,
        "distinct_experts": float(len(used)),
        "expert_bytes": float(len(used) * expert_bytes),
        "rows_least": float(min(used)),
        "rows_median": float(median(used)),
    }
