"""One collective of several ranks, in high precision and composed of codes of FP8."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from fp8bench.formats.hardware import refused
from fp8bench.model import Case, DeviceFacts, Params, Scalars, Support, Work
from fp8bench.model.ranks import Transfer
from fp8bench.protocols import Grid, Phases, Precision, Setup, SilentPhases, Workload
from fp8bench.protocols.axes import Axis
from fp8bench.protocols.workload import StepParts
from fp8bench.registry import workloads
from fp8bench.units import EXACT_DB

if TYPE_CHECKING:
    from torch import Tensor

    from fp8bench.numerics.collectives import InFP8, Plain

COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast")
REDUCING = ("all_reduce", "reduce_scatter")
WAYS = ("fp8_gather", "fp8_twoshot", "fp8_ring")
SCALINGS = ("pre", "post", "ms_amp", "fp8lm_auto")
DTYPES = ("fp32", "bf16", "fp16", "fp8")
# Parameters that only apply to FP8 in a reducing collective.
_FP8_PARAMETERS = ("fp8", "scaling")
# Each rank's part has whole blocks of scales.
_MULTIPLE = 32
_ELEMENT_BYTES = 4
# FP8-LM's mu, which begins at 1 and is halved, settles within this many steps.
_SETTLING_STEPS = 8


@dataclass
class CollectiveState:
    """The input of this rank, and its last result."""

    kind: Plain | InFP8
    given: Tensor
    rank: int
    size: int
    got: Tensor | None = None


@workloads.register("collective")
class Collective(Workload):
    """Exchanges of gradients between ranks. fp8 is sent as E4M3, summed by the method `fp8` and scaled by the method
    `scaling`. Times of fp8 include casting, sending and summing. The input counts as float32 in all precisions, so that
    throughputs compare."""

    name = "collective"
    summary = (
        "all-reduce, all-gather, reduce-scatter, all-to-all and broadcast of several ranks (--ranks), FP8 included"
    )
    listed = False
    least_ranks = 2
    fused = False
    dtypes = DTYPES
    # One variant of FP8 only, and default sizes.
    history = Grid(
        cpu={"collective": COLLECTIVES, "fp8": ("fp8_twoshot",), "scaling": ("ms_amp",)},
        gpu={"collective": COLLECTIVES, "fp8": ("fp8_twoshot",), "scaling": ("ms_amp",)},
        dtypes=("fp32", "bf16", "fp8"),
        phases=("cast", "communication"),
        errors=("relative_error", "flushed_percent"),
        ranks=(2, 8),
    )

    def axes(self, facts: DeviceFacts) -> tuple[Axis, ...]:
        elements = 1 << 26 if facts.accelerated else 1 << 20
        return (
            Axis.each("collective", "what the ranks do together", *COLLECTIVES),
            Axis.count("elements", "numbers of the whole vector", str(elements), high=1 << 32, quick=(str(1 << 16),)),
            Axis.each(
                "fp8",
                "how means are composed of codes: fp8_gather (all codes to all, added up in float32), "
                "fp8_twoshot (codes to the owner of a part, codes of its mean back), fp8_ring (rounded at every hop)",
                *WAYS,
            ),
            Axis.each(
                "scaling",
                "of values before they are codes: pre (1/N), post (1), ms_amp (1/sqrt N, what its code "
                "does), fp8lm_auto (FP8-LM's mu, and the smallest of the ranks' scales)",
                *SCALINGS,
                quick=("ms_amp", "fp8lm_auto"),
            ),
        )

    def expand(self, params: Scalars) -> tuple[Params, ...]:
        left_out = () if params["collective"] in REDUCING else _FP8_PARAMETERS
        return (tuple((name, value) for name, value in params.items() if name not in left_out),)

    def work(self, params: Scalars) -> Work:
        size = float(_ELEMENT_BYTES * int(params["elements"]))
        return Work(bytes=size, least_memory=size / 4)

    def support(self, params: Scalars, precision: Precision, facts: DeviceFacts) -> Support:
        if facts.ranks < 2:
            return refused("a collective takes 2 ranks, and there is 1: add --ranks 2")
        if precision.name not in DTYPES:
            return refused(f"{precision.name} is none of the formats that are sent: choose one of {', '.join(DTYPES)}")
        if int(params["elements"]) % (_MULTIPLE * facts.ranks):
            return refused(
                f"{params['elements']} elements cannot be divided equally among {facts.ranks} ranks: choose a "
                f"multiple of {_MULTIPLE * facts.ranks}"
            )
        return precision.support(facts)

    def prepare(self, setup: Setup) -> CollectiveState:
        """Prepares the exchange, and checks the sum 1 + ... + 1 before anything is timed."""
        from fp8bench.numerics.collectives import Plain, check_ones

        kind, values, rank, size = _parts(setup)
        check_ones(kind, _MULTIPLE * size, rank, size, setup.facts.key)
        values_given = kind.given(values, size) if isinstance(kind, Plain) else values
        return CollectiveState(kind, values_given, rank, size)

    def step(self, state: CollectiveState, phase: Phases) -> None:
        from fp8bench.numerics.collectives import Plain

        if isinstance(state.kind, Plain):
            state.got = state.kind(state.given, state.size, phase.communication)
            return
        with phase.cast:
            state.got = state.kind(state.given, state.rank, state.size, phase.communication).values

    def error(self, setup: Setup) -> dict[str, float]:
        import torch

        from fp8bench.numerics.collectives import InFP8, expected, rank_values

        # 1. Measure what a cast loses before anything is sent.
        state = self.prepare(setup)
        shares: list[Any] = [0.0, 0.0]
        if isinstance(state.kind, InFP8):
            shares = _shares(state)
        else:
            lost = (state.given == 0).sum() - (_source(setup, state.rank)[: state.given.numel()] == 0).sum()
            shares[1] = lost / state.given.numel()
        # 2. Compare the result with the exact one of all ranks' values, which each rank can draw.
        self.step(state, SilentPhases())
        assert state.got is not None
        count = int(setup.case.param("elements"))
        sources = [rank_values(setup.seed, rank, count) for rank in range(state.size)]
        exact = expected(str(setup.case.param("collective")), sources, state.rank)
        noise = (state.got.cpu().double() - exact).square().sum()
        # 3. Use one collective for all sums, because every rank must call equally many.
        sums = torch.stack(
            [torch.as_tensor(share).double().cpu().reshape(()) for share in (noise, exact.square().sum(), *shares)]
        )
        return _figures(sums.to(setup.facts.key), state.size)

    def transfer(self, setup: Setup) -> Transfer:
        from fp8bench.numerics.collectives import InFP8, bus_factor
        from fp8bench.numerics.rank_programs import Counted

        state = self.prepare(setup)
        elements = int(setup.case.param("elements"))
        factor = bus_factor(str(setup.case.param("collective")), state.size)
        logical = float(_ELEMENT_BYTES * elements)
        if isinstance(state.kind, InFP8):
            counted = Counted(state.size)
            state.kind(state.given, state.rank, state.size, SilentPhases().communication, counted)
            return Transfer(logical, float(elements), counted.bytes, factor, counted=True)
        sent = state.kind.sent(state.given, state.size)
        return Transfer(logical, float(elements * state.given.element_size()), sent, factor, counted=False)

    def sent_by(self, case: Case) -> Params:
        """Drops parameters that only matter for FP8: other precisions send the same for each of its variants."""
        return tuple(param for param in case.params if case.precision == "fp8" or param[0] not in _FP8_PARAMETERS)

    def step_parts(self, setup: Setup) -> StepParts | str:
        """Returns products, and the collective in asynchronous form: for FP8 its first exchange of codes."""
        import torch

        from fp8bench.numerics.collectives import Plain

        if setup.case.precision == "fp8" and setup.params.get("fp8") == "fp8_ring":
            return "what a rank sends at a hop is not known before the last hop has come, so that it has to wait"
        state = self.prepare(setup)
        a = torch.randn(512, 512, device=setup.facts.key)
        kind = state.kind
        source = state.given
        rank = state.rank
        size = state.size
        if isinstance(kind, Plain):
            return StepParts(lambda: torch.mm(a, a), lambda: kind.begun(source, size))
        return StepParts(lambda: torch.mm(a, a), lambda: kind.begun(source, rank, size))


def _parts(setup: Setup) -> tuple[Plain | InFP8, Tensor, int, int]:
    import torch
    import torch.distributed as dist

    from fp8bench.numerics.collectives import InFP8, Plain

    rank = dist.get_rank()
    size = dist.get_world_size()
    params = setup.params
    precision = setup.case.precision
    collective = str(params["collective"])
    dtypes = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
    values = _source(setup, rank)
    if precision in dtypes:
        return Plain(collective, dtypes[precision]), values, rank, size
    return InFP8(collective, str(params.get("fp8", "")), str(params.get("scaling", ""))), values, rank, size


def _source(setup: Setup, rank: int) -> Tensor:
    from fp8bench.numerics.collectives import rank_values

    return rank_values(setup.seed, rank, int(setup.case.param("elements"))).to(setup.facts.key)


def _shares(state: CollectiveState) -> list[Any]:
    """Returns the share of codes that are the format's largest, and of values sent as zero, once mu has settled."""
    from fp8bench.numerics import collectives
    from fp8bench.numerics.rank_programs import on_this_rank

    kind = state.kind
    source = state.given
    rank = state.rank
    size = state.size
    assert isinstance(kind, collectives.InFP8)
    around = SilentPhases().communication
    for _ in range(_SETTLING_STEPS if kind.scaling == "fp8lm_auto" else 1):
        share = collectives.saturated_share(kind(source, rank, size, around).codes)
    if kind.collective not in REDUCING:
        return [share, 0.0]
    return [share, on_this_rank(collectives.flushed_share(source, kind.scaling, size, kind.auto), None, around)]


def _figures(sums: Tensor, size: int) -> dict[str, float]:
    """Computes errors from sums over all ranks, which have different values."""
    import torch.distributed as dist

    dist.all_reduce(sums)
    noise, signal, saturation, flush = sums.tolist()
    return {
        "sqnr_db": min(EXACT_DB, 10 * math.log10(signal / noise)) if noise > 0 else EXACT_DB,
        "relative_error": math.sqrt(noise / signal) if signal > 0 else 0.0,
        "saturated_ppm": saturation / size * 1e6,
        "flushed_percent": flush / size * 100,
    }
