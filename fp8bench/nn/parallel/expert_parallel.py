"""Expert parallelism: each rank has some experts and its share of a batch; tokens go to their experts' ranks and back.

An expert's rows have the order that they have on one rank, those of the first rank first, so that its products are the
same bit for bit. All else is on every rank and gets the sum of all ranks' gradients. In FP8 tokens travel as E4M3 codes
with a scale for 128 elements; results, and all gradients, travel in bf16.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor, nn

from fp8bench.nn.experts import Experts, decode_rows, encode_rows
from fp8bench.nn.gpt import GPT, Block
from fp8bench.nn.parallel.exchanges import RankGroup, exchanged
from fp8bench.nn.parallel.model import ParallelModel
from fp8bench.nn.parallel.ways import Job
from fp8bench.protocols import Phases

_EXPERTS = ".experts."


class RankedExperts(Experts):
    """This rank's share of a block's experts. `rows` are the numbers of rows that each rank multiplied last."""

    def __init__(self, whole: Experts, group: RankGroup, wire: str) -> None:
        nn.Module.__init__(self)
        self.router, self.count, self.balance = whole.router, whole.count, None
        self.group, self.wire, self.ranks = group, wire, group.size
        self.own = range(self.count // group.size * group.rank, self.count // group.size * (group.rank + 1))
        self.experts = nn.ModuleList(whole.experts[number] for number in self.own)  # type: ignore[assignment]
        self.ahead = None if whole.ahead is None else whole.ahead.chunk(group.size)[group.rank]
        self._tokens: list[list[int]] = []
        self.rows: list[int] = []

    def _counts_of_all_ranks(self, counts: Tensor) -> Tensor:
        table = torch.stack(self.group.all_of(counts))
        self._tokens = table.tolist()  # the host waits for the numbers of rows to send
        self.rows = [sum(expert) for expert in table.view(self.ranks, self.ranks, -1).sum(0).tolist()]
        return table.sum(0)

    def _through_experts(self, rows: Tensor, counts: Tensor, phase: Phases) -> Tensor:
        here = [tokens[self.own.start : self.own.stop] for tokens in self._tokens]
        own_tokens = self._tokens[self.group.rank]
        each = len(own_tokens) // self.ranks
        sent = [sum(own_tokens[each * rank : each * (rank + 1)]) for rank in range(self.ranks)]
        received = [sum(tokens) for tokens in here]
        got = self._exchanged(rows, sent, received, self.wire)
        numbers = torch.tensor(_by_expert(here), dtype=torch.int64, device=rows.device)
        sizes = [sum(expert) for expert in zip(*here, strict=True)]
        parts = torch.split_with_sizes(got[numbers], sizes)
        made = torch.cat(self._each(parts, torch.tensor(sizes, device=rows.device), phase))
        return self._exchanged(made[numbers.argsort()], received, sent, "bf16" if self.wire == "fp8" else self.wire)

    def _exchanged(self, x: Tensor, sent: Sequence[int], received: Sequence[int], wire: str) -> Tensor:
        back = "bf16" if wire == "fp8" else wire
        return exchanged(
            x, lambda y: self._sent(y, sent, received, wire), lambda y: self._sent(y, received, sent, back)
        )

    def _sent(self, x: Tensor, sent: Sequence[int], received: Sequence[int], wire: str) -> Tensor:
        if wire == "stream":
            return self.group.exchanged_rows(x, sent, received)
        with self.group.phase.cast:
            words = encode_rows(x) if wire == "fp8" else (x.to(torch.bfloat16),)
        got = [self.group.exchanged_rows(word, sent, received) for word in words]
        with self.group.phase.cast:
            return decode_rows(got[0], got[1], x.dtype) if wire == "fp8" else got[0].to(x.dtype)


def _by_expert(tokens: Sequence[Sequence[int]]) -> list[int]:
    """Places of rows that came by rank, and within each rank by expert, in the order of experts."""
    flat = [count for of_rank in tokens for count in of_rank]
    begins = [0, *accumulate(flat)]
    experts = len(tokens[0])
    return [
        place
        for expert in range(experts)
        for part in range(expert, len(flat), experts)
        for place in range(begins[part], begins[part + 1])
    ]


class ExpertsByRanks(ParallelModel):
    """A rank's experts, and all else of the model, which reads the rank's share of a batch."""

    module: GPT

    def __init__(self, job: Job) -> None:
        self.group = self.sharers = job.group
        self._shared, self.module = RankGroup(job.group), job.make()
        for block in self.module.blocks:
            assert isinstance(block, Block) and isinstance(block.mlp, Experts)
            block.mlp = RankedExperts(block.mlp, self._shared, job.options["wire"])
        self._each = job.config.experts // self._shared.size
        named = {
            self._numbered(name, self._shared.rank): parameter for name, parameter in self.module.named_parameters()
        }
        super().__init__(named, job.loss_scale)

    def _numbered(self, name: str, rank: int) -> str:
        front, experts, rest = name.partition(_EXPERTS)
        number, _, layer = rest.partition(".")
        return f"{front}{experts}{int(number) % self._each + rank * self._each}.{layer}" if experts else name

    def loss(self, tokens: Tensor, targets: Tensor, phase: Phases) -> Tensor:
        self._shared.phase = phase
        with phase.elementwise:
            loss = self.forward(self.own_share(tokens), self.own_share(targets), phase)
            (loss * (self.loss_scale / self._shared.size)).backward()  # type: ignore[no-untyped-call]
            pairs = zip(self.names, self.parameters, strict=True)
            self._shared.added_together(
                [parameter.grad for name, parameter in pairs if parameter.grad is not None and _EXPERTS not in name]
            )
        return loss.detach()

    def full_weights(self) -> dict[str, Tensor]:
        weights: dict[str, Tensor] = {}
        for name, weight in zip(self.names, self.weights, strict=True):
            shares = self._shared.all_of(weight) if _EXPERTS in name else [weight]
            weights |= {self._numbered(name, rank): share for rank, share in enumerate(shares)}
        return weights

    def figures(self) -> dict[str, float]:
        """The rows that each rank's experts multiplied in the last step, in all blocks, and the most over the mean."""
        blocks = [block.mlp.rows for block in self.module.blocks if isinstance(block.mlp, RankedExperts)]
        rows = [sum(rank) for rank in zip(*blocks, strict=True)]
        figures = {f"rank{rank}_rows": float(count) for rank, count in enumerate(rows)}
        return {"load_ratio": max(rows) * len(rows) / sum(rows), **figures}
