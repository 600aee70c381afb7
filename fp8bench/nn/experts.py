"""A feed-forward block of many experts, of which each token goes through two, and the GPT that has such blocks.

The router is computed in fp32: which experts it chooses must not depend on how products are rounded. Its two choices
are weighed by their softmax, as Mixtral does. Tokens are sorted by their expert, none is ever dropped, and each
expert's products run in its own arithmetic; where all have one in common that can, they are one product. The loss that
has all experts used alike is Switch's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fp8bench.nn.gpt import GPT, FeedForward
from fp8bench.nn.linear import Choose, Linear, grouped_linear, within
from fp8bench.nn.sizes import CHOSEN, GPTConfig
from fp8bench.protocols import Phases

# As much of the balancing loss as Switch and Mixtral take.
BALANCE = 0.01
# An expert's tokens are filled up to a multiple with zeros: native products contract over them in such blocks.
ROWS = 32


def waited_for(counts: Tensor) -> list[int]:
    """How many tokens each expert has: the one thing that the host waits for in each layer."""
    loads: list[int] = counts.tolist()
    return loads


def routed(
    x: Tensor, router: Tensor, top_k: int, path: str, through: Callable[[Tensor, str], Tensor]
) -> tuple[Tensor, list[int]]:
    """What the experts `path`.N of a served model make of tokens, weighed, and the tokens of each.

    One expert's products after another, whatever its weights are kept in, and no row is filled up: those that the
    router chooses are read alone.
    """
    flat, wide = x.reshape(-1, x.shape[-1]), torch.promote_types(x.dtype, torch.float32)
    best, chosen = F.linear(flat.to(wide), router.to(wide)).topk(top_k)
    loads = waited_for((chosen.view(-1, 1) == torch.arange(len(router), device=x.device)).sum(0))
    order = chosen.flatten().argsort(stable=True)
    parts = enumerate(torch.split_with_sizes(flat[order // top_k], loads))
    done = torch.cat([through(rows, f"{path}.{number}") for number, rows in parts if len(rows)])
    back = done[order.argsort()].view(len(flat), top_k, -1)
    return (back.to(wide) * best.softmax(-1)[..., None]).sum(1).to(x.dtype).view(x.shape), loads


class Experts(nn.Module):
    """`balance` is the balancing loss of the last pass: 1 where all experts are chosen alike, more where not.

    `ahead` are each token's experts where a load is made and not the router's; `count` are those of all ranks. An
    expert without a token multiplies zeros where it `fills_empty`, so that its weights have gradients, zero ones.
    """

    experts: Sequence[FeedForward]
    fills_empty = True
    ahead: Tensor | None = None
    ranks = 1

    def __init__(self, width: int, count: int, expert: Callable[[Choose], FeedForward], choose: Choose) -> None:
        super().__init__()
        self.router = nn.Parameter(torch.randn(count, width) * 0.02)
        made = [expert(within(choose, f"experts.{number}")) for number in range(count)]
        self.experts = nn.ModuleList(made)  # type: ignore[assignment]
        self.count = count
        self.balance: Tensor | None = None

    def forward(self, x: Tensor, phase: Phases) -> Tensor:
        flat = x.reshape(-1, x.shape[-1])
        scores = F.linear(flat.to(self.router.dtype), self.router)
        best, chosen = self._choice(scores)
        every = torch.arange(self.count, device=x.device)
        counts = (chosen.view(-1, 1) == every).sum(0)  # bincount would have the host wait for the device
        shares = self._of_all(counts).to(scores.dtype) / (chosen.numel() * self.ranks)
        self.balance = self.count * (shares * scores.softmax(-1).mean(0)).sum()
        order = chosen.flatten().argsort(stable=True)
        rows = flat[:, None].expand(-1, CHOSEN, -1).reshape(-1, flat.shape[-1])[order]
        found = self._through(rows, counts, phase)[order.argsort()].view(len(flat), CHOSEN, -1)
        weights = best.softmax(-1)[..., None]
        return (found.to(weights.dtype) * weights).sum(1).to(x.dtype).view(x.shape)

    def _choice(self, scores: Tensor) -> tuple[Tensor, Tensor]:
        if self.ahead is None:
            best, chosen = scores.topk(CHOSEN)
            return best, chosen
        chosen = self.ahead[: len(scores)]
        return scores.gather(1, chosen), chosen

    def _of_all(self, counts: Tensor) -> Tensor:
        """The tokens of each expert, of all ranks."""
        return counts

    def _through(self, rows: Tensor, counts: Tensor, phase: Phases) -> Tensor:
        """Rows that lie by expert, and what their experts make of them, in that order."""
        return torch.cat(self._each(torch.split_with_sizes(rows, self._waited_for(counts)), counts, phase))

    _waited_for = staticmethod(waited_for)

    def _each(self, parts: Sequence[Tensor], counts: Tensor, phase: Phases) -> list[Tensor]:
        """Every expert on its tokens, filled up to whole rows of what it multiplies."""
        grouped = self._may_be_grouped()
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
            outputs = tuple(expert(part, phase) if len(part) else _of_nothing(expert, part) for expert, part in pairs)
        return [y[: len(part)] for y, part in zip(outputs, parts, strict=True)]

    def _rows(self, grouped: bool) -> int:
        """What an expert's part is a multiple of."""
        return self.experts[0].up.arithmetic.part_rows if grouped else ROWS

    def _may_be_grouped(self) -> bool:
        """Whether all experts have one arithmetic in common, which has one product for all of them."""
        layers = [layer for expert in self.experts for layer in (expert.up, expert.down)]
        common = layers[0].arithmetic
        sides = (side for layer in layers[:2] for side in layer.weight.shape)
        alike = all(layer.arithmetic is common for layer in layers)
        return common.groups > 0 and alike and not any(side % common.groups for side in sides)

    def _grouped(self, x: Tensor, sizes: list[int], ends: Tensor, phase: Phases) -> Tensor:
        """Two products for all experts, instead of two for each."""
        arithmetic = self.experts[0].up.arithmetic

        def through(x: Tensor, layers: list[Linear]) -> Tensor:
            weights, given = [layer.weight for layer in layers], [layer.operands for layer in layers]
            return grouped_linear(x, weights, sizes, ends, arithmetic, phase, given)

        hidden = self.experts[0].between(through(x, [expert.up for expert in self.experts]))
        return through(hidden, [expert.down for expert in self.experts])


def _of_nothing(expert: FeedForward, part: Tensor) -> Tensor:
    """No rows, through the weights all the same, so that they have gradients."""
    wide = part.to(expert.up.weight.dtype)
    return F.linear(expert.between(F.linear(wide, expert.up.weight)), expert.down.weight).to(part.dtype)


class MixtureGPT(GPT):
    """A GPT whose feed-forward blocks are experts. Its loss is the text's; the balancing loss is in gradients alone."""

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
