"""The experts of a served model: each token's rows go to those that its router chooses, which alone are read.

As in a training step (experts.py), but one expert's products after another, whatever its weights are kept in, and no
row is filled up. The router multiplies in fp32, so that its choice does not depend on how products are rounded.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor


def routed(
    x: Tensor, router: Tensor, top_k: int, path: str, through: Callable[[Tensor, str], Tensor]
) -> tuple[Tensor, list[int]]:
    """What the experts `path`.N make of tokens, weighed by the softmax of their scores, and the tokens of each."""
    flat, wide = x.reshape(-1, x.shape[-1]), torch.promote_types(x.dtype, torch.float32)
    best, chosen = F.linear(flat.to(wide), router.to(wide)).topk(top_k)
    loads = waited_for((chosen.view(-1, 1) == torch.arange(len(router), device=x.device)).sum(0))
    order = chosen.flatten().argsort(stable=True)
    parts = enumerate(torch.split_with_sizes(flat[order // top_k], loads))
    done = torch.cat([through(rows, f"{path}.{number}") for number, rows in parts if len(rows)])
    back = done[order.argsort()].view(len(flat), top_k, -1)
    return (back.to(wide) * best.softmax(-1)[..., None]).sum(1).to(x.dtype).view(x.shape), loads


def waited_for(counts: Tensor) -> list[int]:
    """How many tokens each expert has: the one thing that the host waits for in each layer."""
    loads: list[int] = counts.tolist()
    return loads
