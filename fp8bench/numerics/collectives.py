"""Collectives as they are asked of torch, in one of its dtypes or in FP8, and what they must give.

Reductions are means, so that a step can be done over and over. Of a whole vector each rank brings its own values; of
`all_gather` one part of it, of `broadcast` rank 0's are everybody's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from fp8bench.numerics.fp8_reduce import AutoScale, Reduced, exchanged, mean_in_fp8, sent_round, transported
from fp8bench.numerics.rank_programs import BegunExchange, Counted, Program, begun, on_this_rank, simulated

ALL_REDUCE, ALL_GATHER, REDUCE_SCATTER, ALL_TO_ALL, BROADCAST = COLLECTIVES = (
    "all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast",
)  # fmt: skip
REDUCING = (ALL_REDUCE, REDUCE_SCATTER)
Marker = AbstractContextManager[object]
_FREEDOM = 2.5
_ROW, _ROW_SIGMA = 128, 2.0


class SelfCheckFailed(RuntimeError):
    """Ones that were added up, or sent, came to something else."""


def bus_factor(collective: str, size: int) -> float:
    """What nccl-tests multiplies bytes over time by, so that the number compares with a link's.

    The bytes are those of the whole vector, of all ranks, also where each rank brings or gets one part.
    """
    if collective == BROADCAST:
        return 1.0
    return (2.0 if collective == ALL_REDUCE else 1.0) * (size - 1) / size


def rank_values(seed: int, rank: int, count: int, shared: bool) -> Tensor:
    """What one rank brings: normal values of its own, or half of their variance common to all ranks."""
    own = torch.randn(count, generator=torch.Generator().manual_seed(seed * 4099 + rank + 1))
    if not shared:
        return own
    common = torch.randn(count, generator=torch.Generator().manual_seed(seed * 4099))
    return (own + common).mul_(0.5**0.5)


def signal_values(signal: str, seed: int, rank: int, count: int) -> Tensor:
    """What one rank brings: normal values of its own, partly `shared`, of heavy tails (`student-t`, 2.5 degrees of
    freedom), or in rows of very different sizes, the same on all ranks (`lognormal`)."""
    own = rank_values(seed, rank, count, signal == "shared")
    if signal == "student-t":
        generator = torch.Generator().manual_seed(seed * 4099 + rank + 1_000_001)
        chi_square = 2 * torch._standard_gamma(torch.full((count,), _FREEDOM / 2), generator=generator)
        return own / torch.sqrt(chi_square / _FREEDOM)
    if signal == "lognormal":
        rows = torch.randn(-(-count // _ROW), generator=torch.Generator().manual_seed(seed * 4099))
        return own * torch.exp(_ROW_SIGMA * rows).repeat_interleave(_ROW)[:count]
    return own


def expected(collective: str, sources: Sequence[Tensor], rank: int) -> Tensor:
    """What a rank must get, in float64, from what all bring."""
    exact = [source.double() for source in sources]
    size = len(exact)
    match collective:
        case "all_reduce":
            return torch.stack(exact).mean(0)
        case "reduce_scatter":
            return torch.stack(exact).mean(0).chunk(size)[rank]
        case "all_gather":
            return torch.cat([tensor.chunk(size)[0] for tensor in exact])
        case "all_to_all":
            return torch.cat([tensor.chunk(size)[rank] for tensor in exact])
    return exact[0]


@dataclass
class Plain:
    """One call of torch's, in one dtype."""

    collective: str
    dtype: torch.dtype

    def given(self, values: Tensor, size: int) -> Tensor:
        """What a rank brings, as it is sent; a mean takes its place."""
        whole = values if self.collective != ALL_GATHER else values.chunk(size)[0]
        return whole.to(self.dtype, copy=True)

    def __call__(self, given: Tensor, size: int, communicating: Marker) -> Tensor:
        with communicating:
            return self._asked(given, size, False)[1]

    def begun(self, given: Tensor, size: int) -> Any:
        """What to wait for: it goes on by itself."""
        return self._asked(given, size, True)[0]

    def _asked(self, given: Tensor, size: int, alone: bool) -> tuple[Any, Tensor]:
        import torch.distributed as dist

        match self.collective:
            case "all_reduce":
                return dist.all_reduce(given, dist.ReduceOp.AVG, async_op=alone), given
            case "broadcast":
                return dist.broadcast(given, 0, async_op=alone), given
            case "all_gather":
                received = given.new_empty(given.numel() * size)
                gather = newest("all_gather_single", "all_gather_into_tensor")
                return gather(received, given, async_op=alone), received
            case "reduce_scatter":
                received = given.new_empty(given.numel() // size)
                scatter = newest("reduce_scatter_single", "reduce_scatter_tensor")
                return scatter(received, given, op=dist.ReduceOp.AVG, async_op=alone), received
        received = torch.empty_like(given)
        return dist.all_to_all_single(received, given, async_op=alone), received

    def sent(self, given: Tensor, size: int) -> float:
        """The bytes that a rank sends in a ring: its share of the tensor that torch is given."""
        whole = given.numel() * given.element_size() * (size if self.collective == ALL_GATHER else 1)
        factor = bus_factor(self.collective, size) if self.collective != BROADCAST else (size - 1) / size
        return whole * factor


@dataclass
class InFP8:
    """Composed of exchanges of codes; `auto` goes on from step to step."""

    collective: str
    way: str = ""
    scaling: str = ""
    auto: AutoScale = field(default_factory=AutoScale)

    def program(self, values: Tensor, rank: int, size: int) -> Program[Reduced]:
        match self.collective:
            case "all_gather":
                return transported(values.chunk(size)[0])
            case "all_to_all":
                return exchanged(values, size)
            case "broadcast":
                return sent_round(values)
        return mean_in_fp8(self.way, values, self.scaling, rank, size, self.auto, self.collective == ALL_REDUCE)

    def __call__(self, values: Tensor, rank: int, size: int, around: Marker, counted: Counted | None = None) -> Reduced:
        return on_this_rank(self.program(values, rank, size), counted, around)

    def begun(self, values: Tensor, rank: int, size: int) -> BegunExchange[Reduced]:
        """Cast, with the first exchange of codes going on by itself."""
        return begun(self.program(values, rank, size))

    def alone(self, sources: Sequence[Tensor]) -> list[Reduced]:
        """What each rank gets, by the same programs in this process; a mu goes on from where this one stands."""
        each = [InFP8(self.collective, self.way, self.scaling, AutoScale(self.auto.mu)) for _ in sources]
        pairs = enumerate(zip(each, sources, strict=True))
        return simulated([in_fp8.program(values, rank, len(sources)) for rank, (in_fp8, values) in pairs])


def check_ones(kind: Plain | InFP8, count: int, rank: int, size: int, device: str) -> None:
    """1 + ... + 1 before anything is timed: dtypes have been added up as integers by backends that did not know them.

    In FP8 the mean need not be 1 (a ring's sum may saturate), but it is bit for bit what the format makes of it.
    """
    ones = torch.ones(count, device=device)
    if isinstance(kind, Plain):
        sums = kind(kind.given(ones, size), size, nullcontext()).float()
        wanted = torch.ones_like(sums)
    else:
        alone = kind.alone([torch.ones(count) for _ in range(size)])
        fresh = InFP8(kind.collective, kind.way, kind.scaling)
        sums, wanted = fresh(ones, rank, size, nullcontext()).values.cpu(), alone[rank].values
    if not torch.equal(sums, wanted):
        at = int((sums != wanted).nonzero()[0])
        raise SelfCheckFailed(
            f"the self-check of {kind.collective} over {size} ranks: ones came to {float(sums[at])!r}, and must come "
            f"to {float(wanted[at])!r} (1 + ... + 1 over {size}); nothing of it is timed"
        )


def newest(*names: str) -> Callable[..., object]:
    """torch 2.13 has new names for some, and warns of the old ones."""
    import torch.distributed as dist

    collective: Callable[..., object] = next(getattr(dist, name) for name in names if hasattr(dist, name))
    return collective
