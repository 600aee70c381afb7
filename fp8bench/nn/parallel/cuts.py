"""Which weights of a block are cut between the ranks of a tensor-parallel group, and how a rank's share is had.

A layer that makes features is cut by its outputs, each of the parts that lie behind each other in it (queries, keys and
values; gate and value) by itself, so that a rank has whole heads. The layer that takes those features is cut by its
inputs, and what ranks get of it has to be added up. No torch here: plans read it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from fp8bench.nn.sizes import GPTConfig

if TYPE_CHECKING:
    from torch import Tensor

OUTPUTS, INPUTS = 0, 1
# Whose largest magnitude scales a part of a tensor.
OWN, OF_GROUP = AMAX_GROUPS = ("own", "group")


@dataclass(frozen=True)
class Cut:
    """Along `dim` there are parts of such sizes, and each rank has its share of every one of them."""

    dim: int
    parts: tuple[int, ...]

    def share(self, whole: Tensor, rank: int, ranks: int) -> Tensor:
        import torch

        return torch.cat(
            [one.chunk(ranks, self.dim)[rank] for one in torch.split(whole, list(self.parts), self.dim)], self.dim
        )

    def joined(self, shares: Sequence[Tensor]) -> Tensor:
        """The whole of what all ranks have."""
        import torch

        sizes = [size // len(shares) for size in self.parts]
        by_part = zip(*(torch.split(share, sizes, self.dim) for share in shares), strict=True)
        return torch.cat([one for part in by_part for one in part], self.dim)


def cuts(config: GPTConfig) -> dict[str, Cut]:
    """Of the linear layers of a block, by their path in it."""
    keys = config.key_heads * config.head_width
    up = (config.hidden,) * (2 if config.modern else 1)
    return {
        "attn.qkv": Cut(OUTPUTS, (config.width, keys, keys)),
        "attn.out": Cut(INPUTS, (config.width,)),
        "mlp.up": Cut(OUTPUTS, up),
        "mlp.down": Cut(INPUTS, (config.hidden,)),
    }


def cut_of(parameter: str, config: GPTConfig) -> Cut | None:
    """How a parameter of the model is cut, by its name in it; None of one that every rank has whole."""
    words = parameter.split(".")
    return cuts(config).get(".".join(words[2:-1])) if words[0] == "blocks" else None


def uncuttable(config: GPTConfig, ranks: int) -> str:
    """Why so many ranks cannot share a model's blocks; '' where they can."""
    numbers = {"heads": config.heads, "heads of keys": config.key_heads, "hidden features": config.hidden}
    for what, number in numbers.items():
        if number % ranks:
            return f"{number} {what} have no equal share for each of {ranks} ranks: choose another size"
    return "experts are not cut here: choose a size without them" if config.experts else ""
