"""Defines every figure of a case in one row. Tables, CSV, charts, the history, comparisons, gates and docs read these
rows, and name no figure themselves.

A new figure needs a row in this module and code that measures it: a `Measurement` of the record, or a function in
METRIC_FUNCTIONS of analysis/metrics.py. The tables of figures in docs/reference.md come from this module.
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

# The name of the complete step in lists of phases.
STEP = "step"
# The times of two builds of the same program differ by up to this relative amount, because their code and data have
# different addresses.
BAND = 0.01
# A relative change of the mean loss in the suite `learning`. Summing in a different order changes this loss by a third
# as much.
LOSS_BAND = 0.001
# Values in these units come from clocks and sensors, so they differ from one measurement to the next.
_NOISY_UNITS = frozenset({"s", "J", "W"})


class Better(StrEnum):
    """Which values of a figure are better: lower ones, higher ones or neither."""

    LOWER = "lower"
    HIGHER = "higher"
    NONE = "none"


class Rank(StrEnum):
    """The outputs that show a figure. MAIN: all of them. DETAIL: all but TensorBoard and Weights & Biases, because the
    figure is a part of a different figure or derived from one. RESTATED: it is shown in a different figure's row, and
    has a separate row only in the history and in comparisons.
    """

    MAIN = "main"
    DETAIL = "detail"
    RESTATED = "restated"


@dataclass(frozen=True, eq=False, repr=False, slots=True)
class MetricSpec(str):  # noqa: SLOT000 - the dataclass makes them
    """The properties of a figure. As a string it is the figure's name, in which `*` stands for any text.

    If a case has a value of the figure, `table` gets a column for it: one of fp8bench's tables ('cases', 'sustained',
    'energy', 'capacity') or a separate table; '' for none. `heading` is the heading of this column. `show` formats a
    value if the unit does not determine the format. `page` is the page of the docs about the figure.

    `history` describes the series of the figure, '' if none is stored. The series is stored for each grid of the
    history that has `kept_where`: a phase, a count of work, 'energy', 'ranks' or 'one rank'; '' for all grids.
    `least_change` is the smallest relative change that counts as a change. A gate fails beyond `threshold`, a relative
    and an absolute difference. A `counted` figure has the same value whenever the same code runs. The three
    `error_sizes` are the largest negligible, the largest small and the largest moderate error. A figure `of_workload`
    is measured by a suite, which may use its name.
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

    def format_value(self, value: float | None, unit: str = "", digits: int = 3) -> str:
        """Formats a value of the figure. `unit` is the unit in which the value is stored, if it differs from the
        figure's unit. `digits` applies only to times and energies.
        """
        if value is None or self.show is None:
            return units.describe(value, unit or self.unit, digits)
        return self.show(value)


# All figures by name, in the order of the docs.
METRICS: dict[str, MetricSpec] = {}


def _add_spec(name: str, unit: str, description: str, **fields: Any) -> MetricSpec:
    return METRICS.setdefault(name, MetricSpec(name, unit, description, **fields))


def _show_exact(unit: str = "") -> Callable[[float], str]:
    return lambda value: f"{value:,.0f} {unit}".rstrip()


def time_of_phase(phase: str) -> str:
    """Returns the name of the figure for a phase's time, such as 'time_gemm'."""
    return f"time_{phase}"


def memory_of_role(role: str) -> str:
    return f"memory_{role}"


_NEITHER = Better.NONE
_HIGHER = Better.HIGHER
_MAIN = Rank.MAIN
_RESTATED_RANK = Rank.RESTATED
# The largest change for the worse, relative and absolute, that a gate lets pass. A new memory layout alone changes a
# time by less than 5%.
_TIME_THRESHOLD = (0.05, 5e-6)
_RATIO_THRESHOLD = (0.05, 0.005)
_ENERGY_THRESHOLD = (0.05, 1e-3)

# fmt: off
TIME = _add_spec(
    "time", "s", "time of the step and of each of its phases", rank=_MAIN, threshold=_TIME_THRESHOLD,
    history="a step: the fastest call of each round",
)
REPLAY = _add_spec(
    "replay_time", "s",
    "best time of the device alone: each step is repeated as one launch, without the host's launches; "
    "verdicts and other figures use the original steps", rank=_MAIN, heading="replayed",
)
MEAN_TIME = _add_spec(
    "mean_time", "s", "mean time of the step over all calls", rank=_RESTATED_RANK,
    history="a step: the mean over all calls, without the time that they waited for a core",
)
for _phase in CELL_PHASES:
    _add_spec(time_of_phase(_phase), "s", f"time of the {_phase} phase", rank=_RESTATED_RANK, threshold=_TIME_THRESHOLD,
         history=f"the {_phase} phase of a step", kept_where=_phase)
# The time of a step, scaled to a fixed amount of its work. Each kind of work, such as FLOPs, has a figure and this
# amount.
TIME_PER_WORK: Mapping[str, tuple[MetricSpec, float]] = {
    count: (
        _add_spec(f"seconds_per_{name}", "s", f"the step's time for {amount:.0e} {count}", rank=_RESTATED_RANK,
             kept_where=count,
             history=f"a step's time for every {amount:.0e} {count} of it"),
        amount,
    )
    for count, name, amount in (("flops", "tflop", 1e12), ("tokens", "mtok", 1e6), ("bytes", "gb", 1e9))
}
# A time relative to the reference depends less on the machine than a time in seconds.
RELATIVE_TIME = _add_spec(
    "relative_time", "x", "the step's time over the reference's in the same rounds", rank=_RESTATED_RANK,
    threshold=_RATIO_THRESHOLD,
    history="a step's time over that of the highest precision in the same round",
)
RELATIVE_MEAN_TIME = _add_spec(
    "relative_mean_time", "x", "the step's mean time over the reference's", rank=_RESTATED_RANK,
    history="a step's mean time over that of the highest precision",
)
RELATIVE_TIMES = frozenset({RELATIVE_TIME, RELATIVE_MEAN_TIME})
SHARE_OF_STEP = _add_spec(
    "share_of_step", units.RATIO,
    "share of a phase in the step's best time; the median is over the shares of single calls", better=_NEITHER
)
# Work per second, by kind of work: tokens, FLOPs or bytes.
WORK_RATES: Mapping[str, MetricSpec] = {
    count: _add_spec(
        f"{count}_per_second", unit,
        f"{count} of a step's work per second; for a phase, those of its operators",
        better=_HIGHER
    )
    for count, unit in (("tokens", "tok/s"), ("flops", "FLOP/s"), ("bytes", "B/s"))
}
CEILING_RATE = _add_spec(
    "ceiling_rate", "FLOP/s",
    "median rate of several runs of the suite `ceilings`; B/s for memory, launches/s for launches",
    better=_HIGHER, rank=_MAIN,
)
CEILING_TIME = _add_spec(
    "ceiling_time", "s", "time of 1 GFLOP, 1 GB or one launch at the ceiling rate, for `compare`",
    rank=_MAIN,
)
SHARE_OF_CEILING = _add_spec(
    "share_of_ceiling", units.RATIO, "least time of a phase by its counted FLOPs, bytes and launches and the measured "
    "ceilings, over its best time", better=_HIGHER, page="method.md#ceilings",
)
SHARE_OF_DATASHEET = _add_spec(
    "share_of_datasheet", units.RATIO, "least time of a phase by the vendor's peak rates, over its best time",
    better=_HIGHER,
    page="method.md#ceilings",
)
PEAK_MEMORY = _add_spec(
    "peak_memory", "B", "bytes of tensors at the highest point of a step", rank=_MAIN, heading="peak memory",
    page="method.md",
    history="tensor memory at the highest point of a step, the state included", threshold=(0.02, float(1 << 20)),
)
DEVICE_PEAK_MEMORY = _add_spec(
    "device_peak_memory", "B", "peak memory on hardware that has the formats: codes and scales replace the "
    "emulation's wide values; derived from the same allocations; equal to `peak_memory` if nothing is "
    "emulated", heading="on a device", page="method.md#memory-on-a-device",
)
PEAK_MEMORIES = (PEAK_MEMORY, DEVICE_PEAK_MEMORY)
for _role in MemoryRole:
    _add_spec(memory_of_role(_role), "B", "part of `peak_memory` with this role; all roles sum to it; derived",
         page="method.md#roles")
RESERVED_MEMORY = _add_spec(
    "reserved_memory", "B", "memory that torch's allocator holds for these tensors", heading="reserved"
)
PROCESS_MEMORY = _add_spec("process_memory", "B", "memory that the driver counts for the process", heading="process")
RESIDENT_MEMORY = _add_spec(
    "resident_memory", "B", "most memory of the machine that the process used, torch included",
    heading="resident",
)
# Memory figures other than the peak memory of a step.
MEMORY_COUNTERS = (RESERVED_MEMORY, PROCESS_MEMORY, RESIDENT_MEMORY)
COUNTERS_TABLE = "counters"
_COUNTER_METRIC_FIELDS: dict[str, Any] = {"table": COUNTERS_TABLE, "page": "method.md#counters"}
ALLOCATOR_TIME = _add_spec(
    "allocator_time", "s", "time in the host's allocator (malloc, free, ...), of the whole process, per step "
    "and phase; this and the next figures only with `--counters`", heading="in the allocator", **_COUNTER_METRIC_FIELDS,
)
ALLOCATOR_CALLS = _add_spec(
    "allocator_calls", "count", "calls of the host's allocator in a step", heading="calls of it", show=_show_exact(),
    **_COUNTER_METRIC_FIELDS
)
ALLOCATED_BYTES = _add_spec(
    "allocated_bytes", "B", "bytes requested in calls of the allocator", heading="asked for", **_COUNTER_METRIC_FIELDS,
)
PAGE_FAULTS = _add_spec(
    "page_faults", "count", "memory pages that a step was first to use; the system clears each", heading="page faults",
    show=_show_exact(), **_COUNTER_METRIC_FIELDS,
)
DEVICE_ALLOCATIONS = _add_spec(
    "device_allocations", "count", "calls of a GPU's driver for more memory than torch's allocator held",
    heading="driver's allocations", show=_show_exact(), **_COUNTER_METRIC_FIELDS,
)
ALLOCATION_RETRIES = _add_spec(
    "allocation_retries", "count", "device allocations that first had to return unused memory", heading="retried",
    show=_show_exact(), **_COUNTER_METRIC_FIELDS,
)
DEVICE_ALLOCATOR_TIME = _add_spec(
    "device_allocator_time", "s", "time in device allocations, by torch's profiler", heading="in them",
    **_COUNTER_METRIC_FIELDS
)
WIRE_BYTES = _add_spec(
    "wire_bytes", "B", "bytes that a rank sends to others in a step", heading="wire",
    history="bytes that a rank sends to others in a step", kept_where="ranks", page="distributed.md",
)
_COUNT_SPEC_FIELDS = {
    "counted": True, "least_change": 0.0, "threshold": (0.0, 0.0), "kept_where": "one rank", "page": "tape.md",
}
FLOPS = _add_spec(
    "flops", "FLOP", "FLOPs of products in a step and in its phases, counted exactly", show=_show_exact("FLOP"),
    history="FLOPs of a step, counted from its operators", **_COUNT_SPEC_FIELDS,
)
MOVED_BYTES = _add_spec(
    "moved_bytes", "B", "bytes read and written by operators, counted exactly", show=_show_exact("B"),
    history="bytes that the operators of a step read and write", **_COUNT_SPEC_FIELDS,
)
LAUNCHES = _add_spec(
    "launches", "count", "least number of started kernels, counted exactly", show=_show_exact(),
    history="operators of a step that start a kernel", **_COUNT_SPEC_FIELDS,
)
# The counts over a step's operators. They are exact: the same code gives the same number.
COUNTS = (FLOPS, MOVED_BYTES, LAUNCHES)
UNKNOWN_OPERATORS = _add_spec(
    "unknown_operators", "count", "calls of operators without a formula, which no sum includes", page="tape.md"
)
USEFUL_FLOPS = _add_spec(
    "useful_flops", "FLOP", "FLOPs of products, less the FLOPs of the next three figures; equal for every precision",
    show=_show_exact("FLOP"), better=_NEITHER, page="tape.md",
)
ROTATION_FLOPS = _add_spec(
    "rotation_flops", "FLOP", "FLOPs of products that rotate tensors in casts", show=_show_exact("FLOP"),
)
PADDING_FLOPS = _add_spec(
    "padding_flops", "FLOP", "FLOPs of matrix sides that are padded beyond the reference's", show=_show_exact("FLOP"),
)
RECOMPUTED_FLOPS = _add_spec(
    "recomputed_flops", "FLOP", "FLOPs of forward products that are repeated, unlike in the reference",
    show=_show_exact("FLOP")
)
INTENSITY = _add_spec(
    "intensity", "FLOP/B", "FLOPs of a step for each byte moved, if every operator is known", better=_NEITHER
)
FLOP_SHARE_BY_ELEMENT_BITS: Mapping[int, MetricSpec] = {
    bits: _add_spec(f"share_of_flops_in_{bits}_bits", units.RATIO,
               "share of a step's FLOPs that multiply elements of this width",
               better=_NEITHER, page="tape.md")
    for bits in (8, 4, 32)
}
SHARE_OF_FLOPS_CONVERTED = _add_spec(
    "share_of_flops_converted", units.RATIO, "share of a step's FLOPs in layers that the case "
    "converts", better=_NEITHER, page="profile.md",
)
ENERGY = _add_spec(
    "energy", "J", "energy of a step: all that the device used while it ran", rank=_MAIN, heading="energy",
    page="energy.md",
    threshold=_ENERGY_THRESHOLD, kept_where="energy",
    history="energy of a step: all that the device used while the step ran, one value per window",
)
ENERGY_NET = _add_spec(
    "energy_net", "J", "energy of a step beyond idle power", rank=_MAIN, threshold=_ENERGY_THRESHOLD, heading="net/step"
)
# The energy of a step, scaled to a fixed amount of its work. Each kind of work has a figure and this amount. The most
# useful kind comes first.
ENERGY_SPEC_BY_WORK_KIND: Mapping[str, tuple[MetricSpec, float]] = {
    count: (
        _add_spec(f"energy_per_{word.lower()}", "J", f"energy for {amount_text} of the step's work", rank=_MAIN,
             threshold=_ENERGY_THRESHOLD,
             heading=f"per {word}"),
        amount,
    )
    for count, word, amount_text, amount in (
        ("tokens", "token", "a token", 1.0), ("flops", "TFLOP", "10^12 FLOPs", 1e12), ("bytes", "GB", "10^9 bytes", 1e9)
    )
}
ENERGY_LOW = _add_spec("energy_low", "J", "energy of a measured phase: its lowest window, less its uncertainty")
ENERGY_HIGH = _add_spec("energy_high", "J", "energy of a measured phase: its highest window, plus its uncertainty")
ENERGY_RESIDUAL = _add_spec(
    "energy_residual", "J", "energy of a step, less that of its measured phases", better=_NEITHER
)
ENERGY_UNCERTAINTY = _add_spec(
    "energy_uncertainty", units.RATIO, "largest possible error of a window's energy; none for power sensors"
)
POWER = _add_spec("power", "W", "power of the device while steps ran", rank=_MAIN)
IDLE_POWER = _add_spec(
    "idle_power", "W", "power of the idle device with the same states in memory", better=_NEITHER, rank=_MAIN,
)
SUSTAINED_STEP_TIME = _add_spec(
    "sustained_time", "s", "median time of a step in turns of several seconds; only with `--sustained`",
    page="energy.md#what-the-figures-are",
)
SUSTAINED_CLOCK = _add_spec(
    "sustained_clock", "Hz", "the device's clock right after the sustained turns", better=_NEITHER
)
SUSTAINED_POWER = _add_spec("sustained_power", "W", "the device's power in the sustained turns", better=_NEITHER)
SM_CLOCK = _add_spec("sm_clock", "Hz", "the device's mean clock over the case's slots", better=_NEITHER)
MAX_BATCH = _add_spec(
    "max_batch", "count", "the largest batch that fits, 0 if none does; only with `--max-batch`", better=_HIGHER,
    page="planning.md",
)
DEVICE_MAX_BATCH = _add_spec(
    "device_max_batch", "count", "largest batch of an emulated case on hardware that has its formats, by a line "
    "through the memory of two batches; derived", better=_HIGHER, heading="on a device", page="planning.md",
)
MAX_BATCH_TOKENS = _add_spec(
    "max_batch_tokens", "count", "tokens of a step with the largest batch", better=_HIGHER, heading="tokens a step",
    show=lambda value: units.whole(int(value)),
)
MAX_BATCH_MEMORY = _add_spec("max_batch_memory", "B", "peak memory of the largest batch", heading="peak memory")
MAX_BATCH_LIMIT = _add_spec("max_batch_limit", "B", "the requested limit of memory")
RANK_SKEW = _add_spec(
    "rank_skew", "%", "difference of the slowest and the fastest rank of a call", heading="skew", page="distributed.md"
)
MEMORY_SKEW = _add_spec(
    "memory_skew", "%", "difference of the ranks with the most and the least memory", heading="skew"
)
COMMUNICATION = _add_spec(
    "communication_time", "s", "the least time that any rank spent in communication", heading="communication"
)
EXPOSED_COMMUNICATION_TIME = _add_spec(
    "exposed_time", "s", "time of products and communication at once, less that of products alone",
    heading="exposed",
)
HIDDEN_COMMUNICATION = _add_spec(
    "hidden_communication", "%",
    "share of communication that products hide: 1 less exposed over communication; may be negative", better=_HIGHER,
    heading="hidden",
)
LOGICAL_BYTES = _add_spec(
    "logical_bytes", "B", "bytes of the complete vector in float32", better=_NEITHER, heading="logical",
)
ALGBW = _add_spec("algbw", "B/s", "bytes of the vector as sent, over the median time of a step", better=_HIGHER)
BUSBW = _add_spec("busbw", "B/s", "algbw times nccl-tests' factor", better=_HIGHER)
EFFECTIVE_BUSBW = _add_spec("effective_busbw", "B/s", "busbw of the logical bytes", better=_HIGHER, heading="effective")
PIPELINE_BUBBLE = _add_spec("bubble", "%", "time that a pipeline's ranks wait or send, over the time that they compute")
IDEAL_BUBBLE = _add_spec("ideal_bubble", "%", "the bubble of equal stages if sending took no time")
STRONG_SCALING = _add_spec(
    "strong_scaling", "%", "time of a step on one rank, over the number of ranks times its time on all ranks",
    better=_HIGHER,
)
WEAK_SCALING = _add_spec(
    "weak_scaling", "%", "time of one rank for its share of the batch, over the time of all ranks for the whole batch",
    better=_HIGHER,
)
BREAK_EVEN = _add_spec("break_even", "count", "a size from which, or up to which, a precision is faster")
VALUE_COUNT = _add_spec(
    "values", "count", "number of values of a kind and role; only in rows of the reference", better=_NEITHER
)
AMAX = _add_spec("amax", "", "largest magnitude of the values before any scaling", better=_NEITHER)
ABOVE_RANGE_SHARE = _add_spec(
    "share_above_*", units.RATIO, "share of the values above the format's largest number", better=_NEITHER,
)
SHARE_VANISHING = _add_spec(
    "share_vanishing_*", units.RATIO, "share of the nonzero values that become zero in the format", better=_NEITHER,
)

# The figures that suites measure. Most of these rows match the end of a name. The first match counts, so the more
# specific ends come first.
_SUITE_SPEC_FIELDS: dict[str, Any] = {"rank": _MAIN, "of_workload": True}
RELATIVE_LOSS = "relative_loss"
LOSS_ERROR = "loss_error"
# The errors of a callable: compared with float64, and compared with the unchanged reference.
OUTPUT_ERROR = "output_error"
DIFFERENCE_ERROR = "difference_error"
# The difference from the reference. It is stored only if rounding does not explain it.
BEYOND_ROUNDING_ERROR = "beyond_rounding_error"
# A relative loss is near 1, and a difference of a thousandth matters, so show five decimals. The gate's threshold is
# twice the smallest change that the history counts.
_add_spec(
    f"*{RELATIVE_LOSS}", "x", "mean loss of a small training over that of bf16, in the suite `learning`",
    show="{:.5f}x".format,
    least_change=LOSS_BAND, threshold=(2 * LOSS_BAND, 0.0), page="history.md#does-it-still-learn", **_SUITE_SPEC_FIELDS,
)
_ERROR_SPEC_FIELDS: dict[str, Any] = {"show": units.relative_error, **_SUITE_SPEC_FIELDS}
# The bounds of small and moderate errors: summing in a different order changes a loss by less than a thousandth, and
# training in a different format by a hundredth.
LOSS_ERRORS = _add_spec(
    f"*{LOSS_ERROR}", units.RATIO, "relative error of a step's loss; 0 is exact",
    error_sizes=(1e-5, LOSS_BAND, 10 * LOSS_BAND), **_ERROR_SPEC_FIELDS,
)
# Rounding to bf16 gives an error of half a percent. A gradient with an error of 30% keeps its direction (cosine 0.96),
# as in published trainings in 4 bits; gradients of two batches differ more.
GRADIENT_ERRORS = _add_spec(
    "*gradient_error", units.RATIO, "relative error of all gradients as one vector; 0 is exact",
    error_sizes=(1e-5, 0.01, 0.3), **_ERROR_SPEC_FIELDS,
)
# Rounding to bf16 gives products an error of half a percent, FP8 4%, and 4 bits 15%.
OTHER_ERRORS = _add_spec("*_error", units.RATIO, "other numerical errors, relative; 0 is exact", **_ERROR_SPEC_FIELDS)
_add_spec("*_vanished", units.RATIO, "share of values that are zero here but not in the reference; a norm hides them",
     show=lambda value: units.share(value) if value else "0%", **_SUITE_SPEC_FIELDS)
_add_spec("*_db", "dB", "numerical errors in decibels", better=_HIGHER, page="formats.md", **_SUITE_SPEC_FIELDS)
# For these figures, neither more nor less is better. The last letter of a name selects its unit.
for _name in ("utilisation_percent", "dynamic_range_octaves", "subnormal_percent"):
    _add_spec(_name, {"t": "%", "s": "octaves"}[_name[-1]], "of a format", better=_NEITHER, page="formats.md",
    **_SUITE_SPEC_FIELDS)
# Figures of mixtures of experts, RLHF models and samplers. Neither higher nor lower values are better.
for _name, _unit, _description in (
    ("load_ratio", "x", "most tokens of an expert, over the mean"),
    ("distinct_experts", "count", "experts that have any token, in all layers"),
    ("expert_bytes", "B", "bytes of the experts' weights with scales, in the multiplied format"),
    ("actor_bytes", "B", "bytes of RLHF's actor between two steps: weights, gradients, moments"),
    ("critic_bytes", "B", "bytes of RLHF's critic, like those of the actor"),
    ("reference_bytes", "B", "bytes of RLHF's reference: stored weights with scales"),
    ("reward_bytes", "B", "bytes of RLHF's reward model: stored weights with scales"),
    ("rows_least", "count", "fewest tokens of an expert that has any"),
    ("rows_median", "count", "median tokens of experts that have any"),
    ("layers_that_agree", "count", "layers before the first whose router chooses other experts than in the exact pass"),
    ("evaluations", "count", "evaluations of the denoiser in all steps of a sampler"),
    ("mean_depth", "count", "mean number of blocks that a row passes before it leaves"),
):
    _show_value = "{:g}".format if _unit == "count" else None
    _add_spec(_name, _unit, _description, better=_NEITHER, page="suites.md", show=_show_value, **_SUITE_SPEC_FIELDS)
for _name_end, _unit in (("percent", "%"), ("ulp", "ulp"), ("octaves", "octaves"), ("ppm", "ppm")):
    _add_spec(f"*_{_name_end}", _unit, f"numerical errors in {_unit}", page="formats.md", **_SUITE_SPEC_FIELDS)
# fmt: on


def find_metric_spec(name: str) -> MetricSpec:
    """Returns the properties of the figure with this name. An unknown name gets the default properties of figures that
    suites measure.
    """
    return METRICS.get(name) or _find_spec_by_pattern(name)


@cache
def _find_spec_by_pattern(name: str) -> MetricSpec:
    spec = next((metric for metric in METRICS.values() if "*" in metric and fnmatchcase(name, metric)), None)
    return replace(spec, name=name) if spec is not None else MetricSpec(name, **_SUITE_SPEC_FIELDS)


def explain_reserved_name(name: str) -> str:
    """Returns why a workload may not use this name for a figure. Returns '' if it may."""
    if name in (STEP, *CELL_PHASES) or not find_metric_spec(name).of_workload:
        return f"{name!r} is the name of a figure or a phase that fp8bench defines. Rename it"
    return ""
