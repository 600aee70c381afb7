"""The suite collective: one collective of several ranks, in high precision or with FP8 codes."""

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
from fp8bench.units import EXACT_SQNR_DB

if TYPE_CHECKING:
    from torch import Tensor

    from fp8bench.numerics.collectives import FP8Collective, PlainCollective

COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast")
SUMMING_COLLECTIVES = ("all_reduce", "reduce_scatter")
FP8_METHODS = ("fp8_gather", "fp8_twoshot", "fp8_ring")
SCALINGS = ("pre", "post", "ms_amp", "fp8lm_auto")
DTYPES = ("fp32", "bf16", "fp16", "fp8")
# The benchmark history covers one FP8 variant, at default sizes.
_HISTORY_AXES = {"collective": COLLECTIVES, "fp8": ("fp8_twoshot",), "scaling": ("ms_amp",)}
# Parameters that only matter for collectives that sum in FP8.
_FP8_PARAMETERS = ("fp8", "scaling")
# Each rank's part of the vector has a multiple of this number of elements, so that it consists of whole scaling blocks.
_ELEMENTS_PER_RANK_MULTIPLE = 32
_ELEMENT_BYTES = 4
# FP8-LM's factor mu starts at 1 and is halved while values saturate. After this many steps it is stable.
_AUTO_SCALE_SETTLING_STEPS = 8


@dataclass
class CollectiveState:
    """The input values of this rank, and the result of its last step."""

    kind: PlainCollective | FP8Collective
    input_values: Tensor
    rank: int
    size: int
    result: Tensor | None = None


@workloads.register("collective")
class Collective(Workload):
    """Exchanges gradients between ranks. In fp8 they are sent as E4M3. The option `fp8` chooses how they are summed,
    and `scaling` how they are scaled. The time of fp8 includes casting, sending and summing. In all precisions,
    throughput counts the input as float32, so that throughputs can be compared.
    """

    name = "collective"
    summary = (
        "all-reduce, all-gather, reduce-scatter, all-to-all and broadcast of several ranks (--ranks), FP8 included"
    )
    listed = False
    least_ranks = 2
    fused = False  # no quantisers are compiled
    dtypes = DTYPES
    history = Grid(
        cpu=_HISTORY_AXES,
        gpu=_HISTORY_AXES,
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
                "how ranks average FP8 codes: fp8_gather (all codes go to all ranks, which add them in "
                "float32), fp8_twoshot (codes go to the owner of a part, codes of its mean go back), "
                "fp8_ring (rounded at every hop)",
                *FP8_METHODS,
            ),
            Axis.each(
                "scaling",
                "factor of values before they are cast to FP8: pre (1/N), post (1), ms_amp (1/sqrt N, as "
                "in its code), fp8lm_auto (FP8-LM's mu, and the smallest scale of all ranks)",
                *SCALINGS,
                quick=("ms_amp", "fp8lm_auto"),
            ),
        )

    def expand(self, params: Scalars) -> tuple[Params, ...]:
        dropped_parameter_names = () if params["collective"] in SUMMING_COLLECTIVES else _FP8_PARAMETERS
        return (tuple((name, value) for name, value in params.items() if name not in dropped_parameter_names),)

    def work(self, params: Scalars) -> Work:
        input_bytes = float(_ELEMENT_BYTES * int(params["elements"]))
        return Work(bytes=input_bytes, least_memory=input_bytes / 4)  # FP8 takes a quarter of float32's bytes

    def support(self, params: Scalars, precision: Precision, facts: DeviceFacts) -> Support:
        if facts.ranks < 2:
            return refused("a collective needs at least 2 ranks, but there is only 1: add --ranks 2")
        if precision.name not in DTYPES:
            return refused(f"collectives do not send {precision.name}: choose one of {', '.join(DTYPES)}")
        if int(params["elements"]) % (_ELEMENTS_PER_RANK_MULTIPLE * facts.ranks):
            return refused(
                f"{params['elements']} elements cannot be divided equally among {facts.ranks} ranks: choose a "
                f"multiple of {_ELEMENTS_PER_RANK_MULTIPLE * facts.ranks}"
            )
        return precision.support(facts)

    def prepare(self, setup: Setup) -> CollectiveState:
        """Prepares the exchange. Exchanges a vector of ones to check that the ranks sum correctly."""
        import torch
        import torch.distributed as dist

        from fp8bench.numerics.collectives import FP8Collective, PlainCollective, check_collective_mean

        params = setup.params
        rank = dist.get_rank()
        size = dist.get_world_size()
        collective = str(params["collective"])
        values = _draw_values(setup, rank)
        dtypes = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
        kind: PlainCollective | FP8Collective
        if setup.case.precision in dtypes:
            kind = PlainCollective(collective, dtypes[setup.case.precision])
            values = kind.make_payload(values, size)
        else:
            kind = FP8Collective(collective, str(params.get("fp8", "")), str(params.get("scaling", "")))
        check_collective_mean(kind, _ELEMENTS_PER_RANK_MULTIPLE * size, rank, size, setup.facts.key)
        return CollectiveState(kind, values, rank, size)

    def step(self, state: CollectiveState, phase: Phases) -> None:
        from fp8bench.numerics.collectives import PlainCollective

        if isinstance(state.kind, PlainCollective):
            state.result = state.kind(state.input_values, state.size, phase.communication)
            return
        with phase.cast:
            state.result = state.kind(state.input_values, state.rank, state.size, phase.communication).values

    def error(self, setup: Setup) -> dict[str, float]:
        import torch
        import torch.distributed as dist

        from fp8bench.numerics.collectives import FP8Collective, compute_exact_result, draw_rank_values

        # 1. Measure how many values saturate or become zero in the cast before sending.
        state = self.prepare(setup)
        if isinstance(state.kind, FP8Collective):
            saturated_share, lost_share = _measure_lost_shares(state)
        else:
            saturated_share = 0.0
            # Do not count values that were zero before the cast. In an all-gather, a rank sends only the first part of
            # its values.
            sent_count = state.input_values.numel()
            uncast_values = _draw_values(setup, state.rank)[:sent_count]
            lost_share = ((state.input_values == 0).sum() - (uncast_values == 0).sum()) / sent_count
        # 2. Compare the result with the exact result. Each rank computes the exact result itself, because the seed
        # determines the values of all ranks.
        self.step(state, SilentPhases())
        assert state.result is not None
        elements = int(setup.params["elements"])
        rank_inputs = [draw_rank_values(setup.seed, rank, elements) for rank in range(state.size)]
        exact = compute_exact_result(str(setup.params["collective"]), rank_inputs, state.rank)
        noise = (state.result.cpu().double() - exact).square().sum()
        # 3. Sum the figures of all ranks, because each rank has other values. Use a single collective, because every
        # rank must call the same number of collectives.
        rank_error_figures = (noise, exact.square().sum(), saturated_share, lost_share)
        summed_figures = torch.tensor(
            [float(summand) for summand in rank_error_figures], dtype=torch.float64, device=setup.facts.key
        )
        dist.all_reduce(summed_figures)
        all_noise, signal, saturation, flush = summed_figures.tolist()
        return {
            "sqnr_db": min(EXACT_SQNR_DB, 10 * math.log10(signal / all_noise)) if all_noise > 0 else EXACT_SQNR_DB,
            "relative_error": math.sqrt(all_noise / signal) if signal > 0 else 0.0,
            "saturated_ppm": saturation / state.size * 1e6,
            "flushed_percent": flush / state.size * 100,
        }

    def transfer(self, setup: Setup) -> Transfer:
        from fp8bench.numerics.collectives import FP8Collective, bus_factor
        from fp8bench.numerics.rank_programs import SentBytes

        state = self.prepare(setup)
        elements = int(setup.params["elements"])
        bus_traffic_ratio = bus_factor(str(setup.params["collective"]), state.size)
        logical_bytes = float(_ELEMENT_BYTES * elements)
        if isinstance(state.kind, FP8Collective):
            sent_bytes_counter = SentBytes(state.size)
            state.kind(state.input_values, state.rank, state.size, SilentPhases().communication, sent_bytes_counter)
            return Transfer(
                logical=logical_bytes,
                payload=float(elements),  # one byte for each FP8 code
                wire=sent_bytes_counter.bytes,
                bus_factor=bus_traffic_ratio,
                counted=True,
            )
        sent_bytes = state.kind.count_sent_bytes(state.input_values, state.size)
        return Transfer(
            logical=logical_bytes,
            payload=float(elements * state.input_values.element_size()),
            wire=sent_bytes,
            bus_factor=bus_traffic_ratio,
            counted=False,
        )

    def sent_by(self, case: Case) -> Params:
        """Returns the parameters of a case that determine which bytes ranks send. Parameters that only matter for FP8
        are left out for other precisions.
        """
        return tuple(param for param in case.params if case.precision == "fp8" or param[0] not in _FP8_PARAMETERS)

    def step_parts(self, setup: Setup) -> StepParts | str:
        """Returns two functions, timed alone and together: a matrix product, and the collective in asynchronous form
        (in FP8 only its first exchange of codes). Returns the reason if the collective cannot be asynchronous.
        """
        import torch

        from fp8bench.numerics.collectives import PlainCollective

        if setup.case.precision == "fp8" and setup.params.get("fp8") == "fp8_ring":
            return "a rank must receive one hop before it knows what to send at the next, so the exchange has to wait"
        state = self.prepare(setup)
        a = torch.randn(512, 512, device=setup.facts.key)
        kind = state.kind
        # A plain collective takes only the number of ranks, and an FP8 collective also its rank.
        rank_arguments = (state.size,) if isinstance(kind, PlainCollective) else (state.rank, state.size)
        return StepParts(lambda: torch.mm(a, a), lambda: kind.start_async_exchange(state.input_values, *rank_arguments))


def _draw_values(setup: Setup, rank: int) -> Tensor:
    from fp8bench.numerics.collectives import draw_rank_values

    return draw_rank_values(setup.seed, rank, int(setup.params["elements"])).to(setup.facts.key)


def _measure_lost_shares(state: CollectiveState) -> tuple[Any, Any]:
    """Returns two shares for an FP8 collective: FP8 codes that saturate at the format's largest value, and nonzero
    input values that are sent as zero. With the scaling fp8lm_auto, both are measured after its factor mu has become
    stable.
    """
    from fp8bench.numerics import collectives
    from fp8bench.numerics.rank_programs import run_on_this_rank

    kind, phase = state.kind, SilentPhases().communication
    assert isinstance(kind, collectives.FP8Collective)
    for _ in range(_AUTO_SCALE_SETTLING_STEPS if kind.scaling == "fp8lm_auto" else 1):
        saturated_share = collectives.compute_saturated_share(
            kind(state.input_values, state.rank, state.size, phase).codes
        )
    if kind.collective not in SUMMING_COLLECTIVES:
        return saturated_share, 0.0
    # This is a program that may exchange scales between ranks. It returns the share when it has run.
    flushed_share_program = collectives.compute_flushed_share(
        state.input_values, kind.scaling, state.size, kind.auto_scale
    )
    return saturated_share, run_on_this_rank(flushed_share_program, marker=phase)
