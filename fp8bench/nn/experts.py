"""A feed-forward block of many experts, of which each token goes through two, and the GPT that has such blocks.

The router is computed in fp32: which experts it chooses must not depend on how products are rounded. Its two choices
are weighed by their softmax, as Mixtral does. Tokens are sorted by their expert, none is ever dropped, and each
expert's products run in its own arithmetic. The loss that has all experts used alike is Switch's.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fp8bench.nn.gpt import GPT, FeedForward
from fp8bench.nn.linear import Choose, within
from fp8bench.nn.sizes import CHOSEN, GPTConfig
from fp8bench.protocols import Phases

# As much of the balancing loss as Switch and Mixtral take.
BALANCE = 0.01
# An expert's tokens are filled up to a multiple with zeros: native products contract over them in such blocks.
ROWS = 32


class Experts(nn.Module):
    """`balance` is the balancing loss of the last pass: 1 where all experts are chosen alike, more where not."""

    def __init__(self, width: int, count: int, expert: Callable[[Choose], nn.Module], choose: Choose) -> None:
        super().__init__()
        self.router = nn.Parameter(torch.randn(count, width) * 0.02)
        self.experts = nn.ModuleList(expert(within(choose, f"experts.{number}")) for number in range(count))
        self.balance: Tensor | None = None

    def forward(self, x: Tensor, phase: Phases) -> Tensor:
        flat = x.reshape(-1, x.shape[-1])
        scores = F.linear(flat.to(self.router.dtype), self.router)
        best, chosen = scores.topk(CHOSEN)
        counts = torch.bincount(chosen.flatten(), minlength=len(self.experts))
        shares = counts.to(scores.dtype) / chosen.numel()
        self.balance = len(self.experts) * (shares * scores.softmax(-1).mean(0)).sum()
        order = chosen.flatten().argsort(stable=True)
        rows = flat[:, None].expand(-1, CHOSEN, -1).reshape(-1, flat.shape[-1])[order]
        # The one thing that the host has to wait for: how many tokens each expert has.
        own = torch.split_with_sizes(rows, counts.tolist())
        parts = [self._one(*pair, phase) for pair in zip(self.experts, own, strict=True)]
        found = torch.cat(parts)[order.argsort()].view(len(flat), CHOSEN, -1)
        weights = best.softmax(-1)[..., None]
        return (found.to(weights.dtype) * weights).sum(1).to(x.dtype).view(x.shape)

    @staticmethod
    def _one(expert: nn.Module, rows: Tensor, phase: Phases) -> Tensor:
        """An expert on its tokens; on zeros where it has none, so that its weights have gradients, zero ones."""
        filled = F.pad(rows, (0, 0, 0, max(ROWS, -(-len(rows) // ROWS) * ROWS) - len(rows)))
        y: Tensor = expert(filled, phase)
        return y[: len(rows)]


class MixtureGPT(GPT):
    """A GPT whose feed-forward blocks are experts. Its loss is the text's; the balancing loss is in gradients alone."""

    def __init__(self, config: GPTConfig, choose: Choose, carrier: torch.dtype, **options: Any) -> None:
        super().__init__(config, choose, carrier, feed_forward=_experts, **options)

    def forward(self, tokens: Tensor, targets: Tensor, phase: Phases, reduction: str = "mean") -> Tensor:
        loss = super().forward(tokens, targets, phase, reduction)
        parts = [one.balance for one in self.modules() if isinstance(one, Experts) and one.balance is not None]
        for one in self.modules():
            if isinstance(one, Experts):
                one.balance = None
        if reduction != "mean" or not self.training:
            return loss
        balance = BALANCE * torch.stack(parts).sum()
        return loss + (balance - balance.detach())


def _experts(config: GPTConfig, gain: float, choose: Choose) -> nn.Module:
    def expert(own: Choose) -> nn.Module:
        return FeedForward(config.width, config.hidden, config.modern, gain, own)

    return Experts(config.width, config.experts, expert, choose)
