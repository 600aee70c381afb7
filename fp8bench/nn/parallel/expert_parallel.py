"""Expert parallelism: each rank has some of the experts, and its share of a batch. Tokens are sent to the ranks of
their experts and back.

An expert's rows have the same order as on one rank, with the first rank's rows first. So its products are
bit-identical. All other weights are on every rank and get the sum of all ranks' gradients. With wire=fp8 tokens are
sent as E4M3 codes with a scale for each 128 elements. Results and all gradients are then sent in bf16.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, chain

import torch
from torch import Tensor, nn

from fp8bench.nn.block import Block
from fp8bench.nn.experts import Experts, decode_rows, encode_rows
from fp8bench.nn.gpt import GPT
from fp8bench.nn.parallel.division import RankModelPart
from fp8bench.nn.parallel.exchanges import RankGroup, exchange_tensors
from fp8bench.nn.parallel.ways import ModelPartSetup
from fp8bench.protocols import Phases

_EXPERTS_PATH = ".experts."


class RankLocalExperts(Experts):
    """The experts of a block that this rank has. `rows` has the number of rows that each rank multiplied in the last
    step.
    """

    def __init__(self, experts: Experts, group: RankGroup, wire: str) -> None:
        # Skip Experts.__init__, which would make new experts.
        nn.Module.__init__(self)
        self.router = experts.router
        self.expert_count = experts.expert_count
        self.balance = None
        self.group = group
        self.wire = wire
        self.ranks = group.size
        expert_count = experts.expert_count // group.size
        self.own_experts = range(expert_count * group.rank, expert_count * (group.rank + 1))
        self.experts = nn.ModuleList(experts.experts[number] for number in self.own_experts)  # type: ignore[assignment]
        self.planned_experts = (
            None if experts.planned_experts is None else experts.planned_experts.chunk(group.size)[group.rank]
        )
        # How many tokens each rank has for each expert.
        self._tokens_by_rank: list[list[int]] = []
        self.rows: list[int] = []

    def _sum_over_ranks(self, counts: Tensor) -> Tensor:
        token_counts_by_rank = torch.stack(self.group.gather_from_ranks(counts))
        # Here the host waits, because it must know how many rows to send.
        self._tokens_by_rank = token_counts_by_rank.tolist()
        rows_by_rank = token_counts_by_rank.view(self.ranks, self.ranks, -1).sum((0, 2))
        self.rows = rows_by_rank.tolist()
        return token_counts_by_rank.sum(0)

    def _run_experts(self, rows: Tensor, counts: Tensor, phase: Phases) -> Tensor:
        # 1. Send each row to the rank of its expert.
        sent_tokens = self._tokens_by_rank[self.group.rank]
        experts_per_rank = len(sent_tokens) // self.ranks
        sent_rows = [
            sum(sent_tokens[first : first + experts_per_rank]) for first in range(0, len(sent_tokens), experts_per_rank)
        ]
        received_tokens_by_rank = [
            tokens[self.own_experts.start : self.own_experts.stop] for tokens in self._tokens_by_rank
        ]
        received_counts = [sum(tokens) for tokens in received_tokens_by_rank]
        received_rows = self._exchange(rows, sent_rows, received_counts, self.wire)

        # 2. Sort the received rows as they would be on one rank, and run the experts.
        expert_row_order = torch.tensor(
            _order_by_expert(received_tokens_by_rank), dtype=torch.int64, device=rows.device
        )
        sizes = [sum(expert) for expert in zip(*received_tokens_by_rank, strict=True)]
        rows_by_expert = torch.split_with_sizes(received_rows[expert_row_order], sizes)
        outputs = torch.cat(self._run_experts_on_parts(rows_by_expert, torch.tensor(sizes, device=rows.device), phase))

        # 3. Restore the order of arrival, and send the results back.
        return self._exchange(
            outputs[expert_row_order.argsort()], received_counts, sent_rows, _choose_return_format(self.wire)
        )

    def _exchange(self, x: Tensor, sent_counts: Sequence[int], received_counts: Sequence[int], wire: str) -> Tensor:
        return_format = _choose_return_format(wire)
        return exchange_tensors(
            x,
            lambda y: self._send_rows(y, sent_counts, received_counts, wire),
            lambda y: self._send_rows(y, received_counts, sent_counts, return_format),
        )

    def _send_rows(self, x: Tensor, sent_counts: Sequence[int], received_counts: Sequence[int], wire: str) -> Tensor:
        if wire == "stream":
            return self.group.exchange_rows(x, sent_counts, received_counts)
        with self.group.phase.cast:
            encoded_values = encode_rows(x) if wire == "fp8" else (x.to(torch.bfloat16),)
        received_rows = [self.group.exchange_rows(part, sent_counts, received_counts) for part in encoded_values]
        with self.group.phase.cast:
            return (
                decode_rows(received_rows[0], received_rows[1], x.dtype)
                if wire == "fp8"
                else received_rows[0].to(x.dtype)
            )


def _choose_return_format(wire: str) -> str:
    return "bf16" if wire == "fp8" else wire


def _order_by_expert(tokens: Sequence[Sequence[int]]) -> list[int]:
    """Returns the order that sorts the received rows by expert. They arrive sorted by rank, and the rows of one rank
    by expert.
    """
    experts = len(tokens[0])
    counts = list(chain.from_iterable(tokens))
    token_part_ends = list(accumulate(counts))
    expert_row_order: list[int] = []
    for expert in range(experts):
        for part in range(expert, len(counts), experts):
            expert_row_order += range(token_part_ends[part] - counts[part], token_part_ends[part])
    return expert_row_order


class ExpertsByRanks(RankModelPart):
    """This rank's experts, and a copy of all other parts of the model, for the rank's share of a batch."""

    module: GPT
    _rank_group: RankGroup

    def __init__(self, job: ModelPartSetup) -> None:
        self.group = self.batch_group = job.group
        self._rank_group = RankGroup(job.group)
        self.module = job.make()
        for block in self.module.blocks:
            assert isinstance(block, Block) and isinstance(block.mlp, Experts)
            block.mlp = RankLocalExperts(block.mlp, self._rank_group, job.options["wire"])
        self._experts_per_rank = job.config.experts // self._rank_group.size
        named_parameters = {
            self._name_in_undivided_model(name, self._rank_group.rank): part
            for name, part in self.module.named_parameters()
        }
        super().__init__(named_parameters, job.loss_scale)
        self.common_parameters = [part for name, part in named_parameters.items() if _EXPERTS_PATH not in name]

    def _name_in_undivided_model(self, name: str, rank: int) -> str:
        """Returns the name that a parameter of a rank has in the whole model."""
        block, experts, layer = name.partition(_EXPERTS_PATH)
        if not experts:
            return name
        number, _, weight = layer.partition(".")
        return f"{block}{experts}{int(number) % self._experts_per_rank + rank * self._experts_per_rank}.{weight}"

    def gather_weights(self) -> dict[str, Tensor]:
        weights: dict[str, Tensor] = {}
        for name, weight in zip(self.names, self.weights, strict=True):
            shares = self._rank_group.gather_from_ranks(weight) if _EXPERTS_PATH in name else [weight]
            for rank, share in enumerate(shares):
                weights[self._name_in_undivided_model(name, rank)] = share
        return weights

    def figures(self) -> dict[str, float]:
        """Returns how many rows the experts of each rank multiplied in the last step, over all blocks. Also returns
        the largest of these numbers divided by their mean.
        """
        blocks = [block.mlp.rows for block in self.module.blocks if isinstance(block.mlp, RankLocalExperts)]
        rows = [sum(rank) for rank in zip(*blocks, strict=True)]
        figures = {f"rank{rank}_rows": float(count) for rank, count in enumerate(rows)}
        return {"load_ratio": max(rows) * len(rows) / sum(rows), **figures}
