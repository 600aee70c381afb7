"""Every figure of a case, one row each: tables, CSV, boards, the history, comparisons, gates and the docs read these
rows, and name no figure themselves.

A new figure is a row here and the place where it is measured: a `Measurement` of the record, or a function in MEASURES
of analysis/metrics.py. The docs' reference takes its tables of figures from here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from fnmatch import fnmatchcase
from functools import cache
from typing import Any

from fp8bench import units
from fp8bench.model.words import CELL_PHASES, MemoryRole

# The whole step, in lists of its phases.
STEP = "step"
# Two builds of one program differ by this much because of where their code and data lie.
BAND = 0.01
# Sums in a different order move the mean loss of the suite learning by a third of it.
LOSS_BAND = 0.001
# Units of clocks and sensors, which never read the same twice.
_NOISY_UNITS = frozenset({"s", "J", "W"})


class Better(StrEnum):
    """Which way a figure becomes better."""

    LOWER = "lower"
    HIGHER = "higher"
    NONE = "none"


class Rank(StrEnum):
    """Where a figure is shown: MAIN everywhere; a DETAIL is part of another figure or follows from one, and boards
    leave it out; a RESTATED figure is shown in the row of a different figure, and has a separate row in the history and
    in comparisons only."""

    MAIN = "main"
    DETAIL = "detail"
    RESTATED = "restated"


@dataclass(frozen=True, eq=False, repr=False, slots=True)
class MetricSpec(str):  # noqa: SLOT000 - the dataclass makes them
    """The properties of a figure before it is measured; as a text it is its name, in which `*` stands for anything.

    `table` is the table of cases that has a column of it under its `heading`, where any case has a value: one of
    fp8bench's ('cases', 'sustained', 'energy', 'capacity'), which name some figures themselves, or one without other
    columns; '' for none. `history` describes its series, '' where none is kept; it is kept for the grids that have the
    word `kept_where`: a phase, a count of work, 'energy', 'ranks' or 'one rank'. `least_change` is the smallest share
    that counts as a change; a gate fails beyond `threshold`, a share and a difference. What is `counted` is the same
    number whenever the same code runs. An error up to the three `error_sizes` is negligible, small and moderate, and
    beyond them large. `show` writes a value, where its unit does not determine that; `page` is the
    page of the docs with more. Figures `of_workload` are measured by a suite, which may use their names.
    """

    name: str
    unit: str = units.RATIO
    description: str = ""
    better: Better = Better.LOWER
    rank: Rank = Rank.DETAIL
    heading: str = ""
    table: str = ""
    history: str = ""
    kept_where: str = ""
    least_change: float = BAND
    threshold: tuple[float, float] = (0.05, 0.0)
    counted: bool = False
    error_sizes: tuple[float, float, float] = (1e-5, 0.01, 0.1)
    show: Callable[[float], str] | None = None
    page: str = ""
    of_workload: bool = False

    def __new__(cls, name: str, *_: object, **__: object) -> MetricSpec:
        return str.__new__(cls, name)

    @property
    def noisy(self) -> bool:
        return self.unit in _NOISY_UNITS

    def to_text(self, value: float | None, unit: str = "", digits: int = 3) -> str:
        """Formats a value, in `unit` where it is stored in a different one; `digits` are those of times and
        energies."""
        if value is None or self.show is None:
            return units.describe(value, unit or self.unit, digits)
        return self.show(value)


# Metrics by name, in the order of the docs.
METRICS: dict[str, MetricSpec] = {}


def _row(name: str, unit: str, description: str, **fields: Any) -> MetricSpec:
    return METRICS.setdefault(name, MetricSpec(name, unit, description, **fields))


def _exact(unit: str = "") -> Callable[[float], str]:
    return lambda value: f"{value:,.0f} {unit}".rstrip()


def time_of_phase(phase: str) -> str:
    """For example 'time_gemm', where phases have no separate column."""
    return f"time_{phase}"


def memory_of_role(role: str) -> str:
    return f"memory_{role}"


_NO = Better.NONE
_UP = Better.HIGHER
_MAIN = Rank.MAIN
_AGAIN = Rank.RESTATED
# Beyond 5% a change in time is more than a new layout of memory does to it.
_TIMES = (0.05, 5e-6)
_RATIOS = (0.05, 0.005)
_JOULES = (0.05, 1e-3)

# fmt: off
TIME = _row(
    "time", "s", "of the step, and of each phase it has", rank=_MAIN, threshold=_TIMES,
    history="a step, the fastest call of each round",
)
REPLAY = _row(
    "replay_time", "s", "the best case of the device alone, without the host's launches: each step done again as one "
    "launch; verdicts and all else are of steps as they are launched", rank=_MAIN, heading="replayed",
)
MEAN = _row(
    "mean_time", "s", "of the step, over all calls", rank=_AGAIN,
    history="a step, the mean over all calls, less what they waited for a core",
)
for _phase in CELL_PHASES:
    _row(time_of_phase(_phase), "s", f"of the {_phase} phase", rank=_AGAIN, threshold=_TIMES,
         history=f"the {_phase} phase of a step", kept_where=_phase)
# Counts of Work that time is given per: the figure, and how many of them.
PER: Mapping[str, tuple[MetricSpec, float]] = {
    count: (
        _row(f"seconds_per_{name}", "s", f"the step's time for {many:.0e} {count}", rank=_AGAIN, kept_where=count,
             history=f"a step's time for every {many:.0e} {count} of it"),
        many,
    )
    for count, name, many in (("flops", "tflop", 1e12), ("tokens", "mtok", 1e6), ("bytes", "gb", 1e9))
}
# The speed of a case independent of the machine.
RELATIVE = _row(
    "relative_time", "x", "the step's time over the reference's in the same rounds", rank=_AGAIN, threshold=_RATIOS,
    history="a step's time over that of the highest precision in the same round",
)
RELATIVE_MEAN = _row(
    "relative_mean_time", "x", "the step's mean time over the reference's", rank=_AGAIN,
    history="a step's mean time over that of the highest precision",
)
RATIOS = frozenset({RELATIVE, RELATIVE_MEAN})
SHARE_OF_STEP = _row(
    "share_of_step", units.RATIO, "of a phase: best by best; the median is over the shares of single calls", better=_NO
)
# Rates by counts of Work.
RATES: Mapping[str, MetricSpec] = {
    count: _row(
        f"{count}_per_second", unit, f"{count} of a step's work; of a phase as the tape counted, best alone", better=_UP
    )
    for count, unit in (("tokens", "tok/s"), ("flops", "FLOP/s"), ("bytes", "B/s"))
}
CEILING_RATE = _row(
    "ceiling_rate", "FLOP/s", "of the suite `ceilings`: the middle of several runs; or in B/s or launches/s",
    better=_UP, rank=_MAIN,
)
CEILING_TIME = _row(
    "ceiling_time", "s", "of the suite `ceilings`: 1 GFLOP, 1 GB or one launch at that rate, which `compare` compares",
    rank=_MAIN,
)
SHARE_OF_CEILING = _row(
    "share_of_ceiling", units.RATIO, "of a phase: the least time that its counted FLOPs, bytes or launches take by "
    "ceilings, over its best time", better=_UP, page="method.md#ceilings",
)
SHARE_OF_DATASHEET = _row(
    "share_of_datasheet", units.RATIO, "of a phase: the same least time by the vendor's peaks", better=_UP,
    page="method.md#ceilings",
)
PEAK_MEMORY = _row(
    "peak_memory", "B", "tensors, at the highest point of a step", rank=_MAIN, heading="peak memory", page="method.md",
    history="tensor memory at the highest point of a step, the state included", threshold=(0.02, float(1 << 20)),
)
DEVICE_PEAK_MEMORY = _row(
    "device_peak_memory", "B", "peak memory where hardware keeps the formats: codes and scales in the place of an "
    "emulation's wide values, for as long; derived from the same allocations; `peak_memory` itself where nothing is "
    "emulated", heading="on a device", page="method.md#memory-on-a-device",
)
PEAKS = (PEAK_MEMORY, DEVICE_PEAK_MEMORY)
for _role in MemoryRole:
    _row(memory_of_role(_role), "B", "`peak_memory` by role: those that occur, which sum to it; derived",
         page="method.md#roles")
RESERVED_MEMORY = _row(
    "reserved_memory", "B", "what torch's allocator keeps from the driver for them", heading="reserved"
)
PROCESS_MEMORY = _row("process_memory", "B", "what the driver counts for the process", heading="process")
RESIDENT_MEMORY = _row(
    "resident_memory", "B", "the most that the process had in the machine's memory, torch itself included",
    heading="resident",
)
# Other counts of a step's memory.
MEMORY_COUNTERS = (RESERVED_MEMORY, PROCESS_MEMORY, RESIDENT_MEMORY)
_COUNTER: dict[str, Any] = {"table": "counters", "page": "method.md#counters"}
ALLOCATOR_TIME = _row(
    "allocator_time", "s", "in calls of the host's allocator (malloc, free and the like), the whole process's; of the "
    "step and of each phase; only with `--counters`, as all that follow", heading="in the allocator", **_COUNTER,
)
ALLOCATOR_CALLS = _row(
    "allocator_calls", "count", "of the host's allocator in a step", heading="calls of it", show=_exact(), **_COUNTER
)
ALLOCATED_BYTES = _row("allocated_bytes", "B", "that calls of the allocator asked for", heading="asked for", **_COUNTER)
PAGE_FAULTS = _row(
    "page_faults", "count", "pages of memory that a step touched first: the system clears each", heading="page faults",
    show=_exact(), **_COUNTER,
)
DEVICE_ALLOCATIONS = _row(
    "device_allocations", "count", "calls of a GPU's driver for memory that torch's allocator did not have",
    heading="driver's allocations", show=_exact(), **_COUNTER,
)
ALLOCATION_RETRIES = _row(
    "allocation_retries", "count", "device allocations that needed unused memory given back first", heading="retried",
    show=_exact(), **_COUNTER,
)
DEVICE_ALLOCATOR_TIME = _row(
    "device_allocator_time", "s", "in device allocations, by torch's profiler", heading="in them", **_COUNTER
)
WIRE_BYTES = _row(
    "wire_bytes", "B", "what a rank sends to others in a step", heading="wire",
    history="that a rank sends to others in a step", kept_where="ranks", page="distributed.md",
)
_COUNTED = {"counted": True, "least_change": 0.0, "threshold": (0.0, 0.0), "kept_where": "one rank", "page": "tape.md"}
FLOPS = _row(
    "flops", "FLOP", "of products in a step and in its phases, counted exactly", show=_exact("FLOP"),
    history="of a step, as its operators were counted", **_COUNTED,
)
MOVED_BYTES = _row(
    "moved_bytes", "B", "read and written by operators, counted exactly", show=_exact("B"),
    history="that the operators of a step read and write", **_COUNTED,
)
LAUNCHES = _row(
    "launches", "count", "kernels started at least, counted exactly", show=_exact(),
    history="of operators in a step that start a kernel", **_COUNTED,
)
# Counts of a tape, exact for a step: the same code gives the same number.
COUNTS = (FLOPS, MOVED_BYTES, LAUNCHES)
UNKNOWN_OPERATORS = _row(
    "unknown_operators", "count", "calls of operators that have no formula and are in no sum", page="tape.md"
)
USEFUL_FLOPS = _row(
    "useful_flops", "FLOP", "of products in a step without the three below: every precision has to do as many",
    show=_exact("FLOP"), better=_NO, page="tape.md",
)
ROTATION_FLOPS = _row("rotation_flops", "FLOP", "of products in casts, which turn tensors", show=_exact("FLOP"))
PADDING_FLOPS = _row("padding_flops", "FLOP", "of sides that are longer than the reference's", show=_exact("FLOP"))
RECOMPUTED_FLOPS = _row(
    "recomputed_flops", "FLOP", "of forward products done once more than the reference does", show=_exact("FLOP")
)
INTENSITY = _row(
    "intensity", "FLOP/B", "of a step: FLOPs for each byte moved, where no operator is unknown", better=_NO
)
SHARES_BY_BITS: Mapping[int, MetricSpec] = {
    bits: _row(f"share_of_flops_in_{bits}_bits", units.RATIO, "of a step's FLOPs that multiply elements so wide",
               better=_NO, page="tape.md")
    for bits in (8, 4, 32)
}
SHARE_CONVERTED = _row(
    "share_of_flops_converted", units.RATIO, "of the FLOPs of the products of a step that are in layers which the case "
    "converts", better=_NO, page="profile.md",
)
ENERGY = _row(
    "energy", "J", "of a step, all that the device took while it ran", rank=_MAIN, heading="energy", page="energy.md",
    threshold=_JOULES, kept_where="energy",
    history="of a step, all that the device took while it ran; one figure a window",
)
ENERGY_NET = _row(
    "energy_net", "J", "of a step, beyond idle power", rank=_MAIN, threshold=_JOULES, heading="net/step"
)
# Joules of a step per count of its work, the most useful first.
ENERGY_PER: Mapping[str, tuple[MetricSpec, float]] = {
    count: (
        _row(f"energy_per_{word.lower()}", "J", f"for {much} of the step's work", rank=_MAIN, threshold=_JOULES,
             heading=f"per {word}"),
        many,
    )
    for count, word, much, many in (
        ("tokens", "token", "a token", 1.0), ("flops", "TFLOP", "10^12 FLOPs", 1e12), ("bytes", "GB", "10^9 bytes", 1e9)
    )
}
ENERGY_LOW = _row("energy_low", "J", "of a measured phase: the lowest of its windows, less its uncertainty")
ENERGY_HIGH = _row("energy_high", "J", "of a measured phase: the highest of its windows, and its uncertainty")
ENERGY_RESIDUAL = _row("energy_residual", "J", "of a step, less all its measured phases", better=_NO)
ENERGY_UNCERTAINTY = _row(
    "energy_uncertainty", units.RATIO, "how far the energy of any of its windows can be off; none for power sensors"
)
POWER = _row("power", "W", "of the device while steps ran", rank=_MAIN)
IDLE_POWER = _row("idle_power", "W", "of the device idle, with the same states in memory", better=_NO, rank=_MAIN)
SUSTAINED_TIME = _row(
    "sustained_time", "s", "a step in turns of seconds, the middle one; only with `--sustained`",
    page="energy.md#what-the-figures-are",
)
SUSTAINED_CLOCK = _row("sustained_clock", "Hz", "the device's clock right after these turns", better=_NO)
SUSTAINED_POWER = _row("sustained_power", "W", "the device's power in these turns", better=_NO)
SM_CLOCK = _row("sm_clock", "Hz", "the device's mean clock over the case's slots", better=_NO)
MAX_BATCH = _row(
    "max_batch", "count", "the largest batch that fits, 0 if none does; only with `--max-batch`", better=_UP,
    page="planning.md",
)
DEVICE_MAX_BATCH = _row(
    "device_max_batch", "count", "the largest batch of an emulated case where hardware keeps its formats, by a line "
    "through what two batches would take there; derived", better=_UP, heading="on a device", page="planning.md",
)
MAX_BATCH_TOKENS = _row(
    "max_batch_tokens", "count", "tokens of a step with the largest batch", better=_UP, heading="tokens a step",
    show=lambda value: units.whole(int(value)),
)
MAX_BATCH_MEMORY = _row("max_batch_memory", "B", "peak memory of the largest batch", heading="peak memory")
MAX_BATCH_LIMIT = _row("max_batch_limit", "B", "the limit that was asked for")
RANK_SKEW = _row(
    "rank_skew", "%", "between the slowest and the fastest rank of a call", heading="skew", page="distributed.md"
)
MEMORY_SKEW = _row(
    "memory_skew", "%", "between the rank that takes most and the one that takes least", heading="skew"
)
COMMUNICATION = _row(
    "communication_time", "s", "the least time that any rank spent in communication", heading="communication"
)
EXPOSED = _row(
    "exposed_time", "s", "products and communication at once, less products alone; an interval is over rounds",
    heading="exposed",
)
HIDDEN_COMMUNICATION = _row(
    "hidden_communication", "%", "1 less the exposed share of communication alone; never cut", better=_UP,
    heading="hidden",
)
LOGICAL_BYTES = _row("logical_bytes", "B", "the whole vector as float32", better=_NO, heading="logical")
ALGBW = _row("algbw", "B/s", "bytes of the vector as it is sent, over the median step", better=_UP)
BUSBW = _row("busbw", "B/s", "algbw times nccl-tests' factor", better=_UP)
EFFECTIVE_BUSBW = _row("effective_busbw", "B/s", "busbw of the logical bytes", better=_UP, heading="effective")
BUBBLE = _row("bubble", "%", "of the time that a pipeline's ranks compute: what they wait or send")
IDEAL_BUBBLE = _row("ideal_bubble", "%", "the bubble of equal stages that send in no time")
STRONG_SCALING = _row("strong_scaling", "%", "one rank's step over ranks times that of all", better=_UP)
WEAK_SCALING = _row("weak_scaling", "%", "the step of one rank with its share over that of all", better=_UP)
BREAK_EVEN = _row("break_even", "count", "a size from which on a precision pays, or up to which it does")
VALUES = _row("values", "count", "how many a kind and role has; in the rows of the reference", better=_NO)
AMAX = _row("amax", "", "the largest magnitude of these values, before any scaling", better=_NO)
SHARE_ABOVE = _row("share_above_*", units.RATIO, "of these values, those above the format's largest", better=_NO)
SHARE_VANISHING = _row("share_vanishing_*", units.RATIO, "those that are not zero, but zero in the format", better=_NO)

# Figures of suites: these rows match by the ends of names, and come after those of single names.
_OF_WORKLOADS: dict[str, Any] = {"rank": _MAIN, "of_workload": True}
RELATIVE_LOSS = "relative_loss"
LOSS_ERROR = "loss_error"
# Errors of a callable: against its reference in float64, and against the unchanged reference.
OUTPUT_ERROR = "output_error"
DIFFERENCE_ERROR = "difference_error"
# Values near 1, where a thousandth matters. A gate's threshold is above the least change of the history.
_row(
    f"*{RELATIVE_LOSS}", "x", "the mean loss of a small training over bf16's, of `learning`", show="{:.5f}x".format,
    least_change=LOSS_BAND, threshold=(2 * LOSS_BAND, 0.0), page="history.md#does-it-still-learn", **_OF_WORKLOADS,
)
_ERRORS: dict[str, Any] = {"show": units.relative_error, **_OF_WORKLOADS}
# A loss differs by less than a thousandth if sums run in a different order, and trainings in other formats by a
# hundredth.
LOSS_ERRORS = _row(
    f"*{LOSS_ERROR}", units.RATIO, "of a step's loss, relative; 0 is exact",
    error_sizes=(1e-5, LOSS_BAND, 10 * LOSS_BAND), **_ERRORS,
)
# Rounding to bf16 makes half a percent. Off by 30%, a gradient keeps its direction (cosine 0.96), as in published
# trainings in 4 bits; gradients of two batches lie further apart.
GRADIENT_ERRORS = _row(
    "*gradient_error", units.RATIO, "of all gradients as one vector, relative; 0 is exact",
    error_sizes=(1e-5, 0.01, 0.3), **_ERRORS,
)
# Rounding to bf16 makes half a percent of a product, to FP8 4%, to 4 bits 15%.
OTHER_ERRORS = _row("*_error", units.RATIO, "other numerical errors, relative; 0 is exact", **_ERRORS)
_row("*_vanished", units.RATIO, "the share of all values that are zero and are not in the reference: what a norm hides",
     show=lambda value: units.share(value) if value else "0%", **_OF_WORKLOADS)
_row("*_db", "dB", "numerical errors in decibels", better=_UP, page="formats.md", **_OF_WORKLOADS)
for _name in ("utilisation_percent", "dynamic_range_octaves", "subnormal_percent"):  # neither more nor less is better
    _row(_name, {"t": "%", "s": "octaves"}[_name[-1]], "of a format", better=_NO, page="formats.md", **_OF_WORKLOADS)
# Mixtures of experts, RLHF's models, samplers: neither more nor less is better.
for _name, _unit, _words in (
    ("load_ratio", "x", "the most tokens that an expert has, over the mean"),
    ("distinct_experts", "count", "those that have any token, of all layers"),
    ("expert_bytes", "B", "of their weights with scales, as they are multiplied"),
    ("actor_bytes", "B", "of RLHF's actor between two steps: weights, gradients, moments"),
    ("critic_bytes", "B", "of RLHF's critic, the same"),
    ("reference_bytes", "B", "of RLHF's reference: weights with scales, as they are kept"),
    ("reward_bytes", "B", "of RLHF's reward model: the same"),
    ("rows_least", "count", "of the tokens of an expert that has any"),
    ("rows_median", "count", "of the tokens of such experts"),
    ("layers_that_agree", "count", "ahead of the first whose router chooses other experts than an exact one"),
    ("evaluations", "count", "of the denoiser, in all steps of a sampler"),
    ("mean_depth", "count", "blocks that a row takes until it leaves, in the mean"),
):
    _show = "{:g}".format if _unit == "count" else None
    _row(_name, _unit, _words, better=_NO, page="suites.md", show=_show, **_OF_WORKLOADS)
for _end, _unit in (("percent", "%"), ("ulp", "ulp"), ("octaves", "octaves"), ("ppm", "ppm")):
    _row(f"*_{_end}", _unit, f"numerical errors in {_unit}", page="formats.md", **_OF_WORKLOADS)
# fmt: on


def spec_of(name: str) -> MetricSpec:
    """The row of a figure by its name; a default row for an unknown name of a suite's figure."""
    return METRICS.get(name) or _by_pattern(name)


@cache
def _by_pattern(name: str) -> MetricSpec:
    spec = next((metric for metric in METRICS.values() if "*" in metric and fnmatchcase(name, metric)), None)
    return replace(spec, name=name) if spec is not None else MetricSpec(name, **_OF_WORKLOADS)


def reserved_name_reason(name: str) -> str:
    """Why a workload may not give a figure this name, '' if it may."""
    if name in (STEP, *CELL_PHASES) or not spec_of(name).of_workload:
        return f"{name!r} is the name of a figure or a phase that fp8bench tells by itself. Rename it"
    return ""
