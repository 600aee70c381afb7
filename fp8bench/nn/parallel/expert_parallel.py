"""Expert parallelism: each rank has some experts and its share of a batch; tokens go to their experts' ranks and back.

An expert's rows have the order that they have on one rank, those of the first rank first, so that its products are the
same bit for bit. All else is on every rank and gets the sum of all ranks' gradients. In FP8 tokens travel as E4M3 codes
with a scale for 128 elements; results, and all gradients, travel in bf16.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, chain

import torch
from torch import Tensor, nn

from fp8bench.nn.block import Block
from fp8bench.nn.experts import Experts, decode_rows, encode_rows
from fp8bench.nn.gpt import GPT
from fp8bench.nn.parallel.division import Division
from fp8bench.nn.parallel.exchanges import RankGroup, exchange
from fp8bench.nn.parallel.ways import Job
from fp8bench.protocols import Phases

_EXPERTS = ".experts."


class RankedExperts(Experts):
    """This rank's share of a block's experts. `rows` are the numbers of rows that each rank multiplied last."""

    def __init__(self, experts: Experts, group: RankGroup, wire: str) -> None:
        nn.Module.__init__(self)
        self.router = experts.router
        self.count = experts.count
        self.balance = None
        self.group = group
        self.wire = wire
        self.ranks = group.size
        share = experts.count // group.size
        self.own = range(share * group.rank, share * (group.rank + 1))
        self.experts = nn.ModuleList(experts.experts[number] for number in self.own)  # type: ignore[assignment]
        self.ahead = None if experts.ahead is None else experts.ahead.chunk(group.size)[group.rank]
        # For each rank the number of its tokens that go to each expert.
        self._tokens: list[list[int]] = []
        self.rows: list[int] = []

    def _sum_over_ranks(self, counts: Tensor) -> Tensor:
        table = torch.stack(self.group.all_of(counts))
        self._tokens = table.tolist()  # the host waits for the numbers of rows to send
        by_rank = table.view(self.ranks, self.ranks, -1).sum((0, 2))
        self.rows = by_rank.tolist()
        return table.sum(0)

    def _run_experts(self, rows: Tensor, counts: Tensor, phase: Phases) -> Tensor:
        # 1. Send each row to the rank of its expert.
        sent_tokens = self._tokens[self.group.rank]
        share = len(sent_tokens) // self.ranks
        sent = [sum(sent_tokens[first : first + share]) for first in range(0, len(sent_tokens), share)]
        received_tokens = [tokens[self.own.start : self.own.stop] for tokens in self._tokens]
        received = [sum(tokens) for tokens in received_tokens]
        arrived = self._exchange(rows, sent, received, self.wire)

        # 2. Sort what came by rank into the order that experts have on one rank, and multiply.
        order = torch.tensor(_order_by_expert(received_tokens), dtype=torch.int64, device=rows.device)
        sizes = [sum(expert) for expert in zip(*received_tokens, strict=True)]
        parts = torch.split_with_sizes(arrived[order], sizes)
        outputs = torch.cat(self._run_parts(parts, torch.tensor(sizes, device=rows.device), phase))

        # 3. Send the results back.
        return self._exchange(outputs[order.argsort()], received, sent, _wire_back(self.wire))

    def _exchange(self, x: Tensor, sent: Sequence[int], received: Sequence[int], wire: str) -> Tensor:
        back = _wire_back(wire)
        return exchange(x, lambda y: self._send(y, sent, received, wire), lambda y: self._send(y, received, sent, back))

    def _send(self, x: Tensor, sent: Sequence[int], received: Sequence[int], wire: str) -> Tensor:
        if wire == "stream":
            return self.group.exchanged_rows(x, sent, received)
        with self.group.phase.cast:
            encoded = encode_rows(x) if wire == "fp8" else (x.to(torch.bfloat16),)
        arrived = [self.group.exchanged_rows(part, sent, received) for part in encoded]
        with self.group.phase.cast:
            return decode_rows(arrived[0], arrived[1], x.dtype) if wire == "fp8" else arrived[0].to(x.dtype)


def _wire_back(wire: str) -> str:
    return "bf16" if wire == "fp8" else wire


def _order_by_expert(tokens: Sequence[Sequence[int]]) -> list[int]:
    """Places of rows that came by rank, and within each rank by expert, in the order of experts."""
    experts = len(tokens[0])
    counts = list(chain.from_iterable(tokens))
    ends = list(accumulate(counts))
    order: list[int] = []
    for expert in range(experts):
        for part in range(expert, len(counts), experts):
            order += range(ends[part] - counts[part], ends[part])
    return order


class ExpertsByRanks(Division):
    """A rank's experts, and all else of the model, which reads the rank's share of a batch."""

    module: GPT
    _shared: RankGroup

    def __init__(self, job: Job) -> None:
        self.group = self.sharers = job.group
        self._shared = RankGroup(job.group)
        self.module = job.make()
        for block in self.module.blocks:
            assert isinstance(block, Block) and isinstance(block.mlp, Experts)
            block.mlp = RankedExperts(block.mlp, self._shared, job.options["wire"])
        self._experts_each = job.config.experts // self._shared.size
        named = {self._whole_name(name, self._shared.rank): part for name, part in self.module.named_parameters()}
        super().__init__(named, job.loss_scale)
        self.common = [part for name, part in named.items() if _EXPERTS not in name]

    def _whole_name(self, name: str, rank: int) -> str:
        """The name in the whole model of a rank's parameter."""
        block, experts, layer = name.partition(_EXPERTS)
        if not experts:
            return name
        number, _, weight = layer.partition(".")
        return f"{block}{experts}{int(number) % self._experts_each + rank * self._experts_each}.{weight}"

    def full_weights(self) -> dict[str, Tensor]:
        weights: dict[str, Tensor] = {}
        for name, weight in zip(self.names, self.weights, strict=True):
            shares = self._shared.all_of(weight) if _EXPERTS in name else [weight]
            for rank, share in enumerate(shares):
                weights[self._whole_name(name, rank)] = share
        return weights

    def figures(self) -> dict[str, float]:
        """The rows that each rank's experts multiplied in the last step, in all blocks, and the most over the mean."""
        blocks = [block.mlp.rows for block in self.module.blocks if isinstance(block.mlp, RankedExperts)]
        rows = [sum(rank) for rank in zip(*blocks, strict=True)]
        figures = {f"rank{rank}_rows": float(count) for rank, count in enumerate(rows)}
        return {"load_ratio": max(rows) * len(rows) / sum(rows), **figures}
