"""The figures of a training as one long table, with a row for each figure of an arm, a seed and a step.

CSV, boards, the page's curves, the terminal's table of last figures and the merging of ranks all read this table. A
new `StepFigure` appears in the CSV and on boards automatically. A row in FIGURES is only needed for a chart, a column
in the terminal, or a way to combine the ranks' values other than their mean.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

from fp8bench import units
from fp8bench.analysis.energy import energy_samples
from fp8bench.features.train.values import (
    Arm,
    ArmCost,
    LayerReading,
    StepFigure,
    StepRow,
    StreamLine,
    TrainingEvent,
    Validation,
)
from fp8bench.model.specs import DEVICE_PEAK_MEMORY

TOKEN_SPEED = "tokens_per_second"
# The figure for a loop's speed if the number of tokens per step is unknown.
STEP_SPEED = "steps_per_second"


class LongTableRow(NamedTuple):
    """One figure in the long table. `line` is the type of the stream's line with this figure, such as 'StepRow'. `of`
    is that of a Validation, such as 'held-out', and '' for all other lines.
    """

    arm: str
    seed: int
    step: int
    line: str
    of: str
    layer: str
    tensor: str
    figure: str
    value: Any


@dataclass(frozen=True)
class Figure:
    """How a figure is shown. Only a figure with a `title` has a chart. Each point of the chart covers the steps since
    the previous point: `reduce_values` computes one value from theirs, and `window` describes it in the caption. `unit`
    is the unit of the axis. A `folded` chart shows only its title until a reader opens it. A `shared` figure has one
    value for all arms together. Only a figure with a `heading` has a column on the terminal. `show` formats its values.
    `combine_over_ranks` computes one value from those of all ranks.
    """

    name: str
    title: str = ""
    heading: str = ""
    show: Callable[[float], str] = "{:.3g}".format
    reduce_values: Callable[[Sequence[float]], float] = lambda values: values[-1]
    folded: bool = True
    shared: bool = False
    unit: str = ""
    window: str = "the values of single steps"
    combine_over_ranks: Callable[[Sequence[float]], float] | None = None


_FIGURES = (
    # Figures that are measured in every step.
    Figure("gradient_norm", "norm of the gradients, before clipping", "gradient norm", folded=False),
    Figure("update_ratio", "norm of the update over that of the weights", "update/weights", folded=False),
    Figure("parameter_norm", "norm of the weights", "weight norm"),
    Figure("clipped", "share of the gradient norm that clipping removed", "clipped", units.percent),
    Figure("loss_scale", "loss scale", "loss scale"),
    Figure("rate", "learning rate", "rate"),
    Figure(TOKEN_SPEED, "throughput in tokens/s", reduce_values=statistics.median, window="of native arms, the median"),
    Figure(STEP_SPEED, "throughput in steps/s", reduce_values=statistics.median, window="the median"),
    # Figures that are measured in watched steps only.
    Figure(
        "memory",
        "memory in use",
        reduce_values=max,
        shared=True,
        unit="B",
        window="in watched steps",
        combine_over_ranks=max,
    ),
    Figure("watched_seconds", combine_over_ranks=max),
    # Figures of a layer or a tensor in a watched step.
    Figure("output_amax", combine_over_ranks=max),
    Figure("attention_score", combine_over_ranks=max),
    Figure("batch_norm_drift", combine_over_ranks=max),
)
FIGURES: dict[str, Figure] = {figure.name: figure for figure in _FIGURES}

# Fields that identify a line. All others are figures.
_LINE_KEY_FIELDS = ("arm", "seed", "step", "layer", "role", "of", "name")
_FIGURE_FIELDS: Mapping[type, Sequence[str]] = {
    kind: [field.name for field in fields(kind) if field.name not in _LINE_KEY_FIELDS]
    for kind in (StepRow, LayerReading, StepFigure, Validation)
}


def list_rows(arms: Iterable[Arm], lines: Iterable[StreamLine]) -> Iterator[LongTableRow]:
    """Yields a row for every known figure of the given lines, and a row with the speed of each timed step. Only native
    arms have speeds, because the speed of emulation is meaningless.
    """
    native_arms = {arm.name for arm in arms if arm.native}
    # Some kinds of lines lack some of these fields. For example, a row of a step has no layer.
    for line in lines:
        text, layer, role, tensor = (getattr(line, name, "") for name in ("of", "layer", "role", "tensor"))
        row_key = (line.arm, line.seed, line.step, type(line).__name__, text, layer, str(role or tensor))
        for figure, value in _list_figures(line):
            if value is not None:
                yield LongTableRow(*row_key, figure, value)
        if isinstance(line, StepRow) and line.arm in native_arms and line.seconds > 0:
            yield LongTableRow(*row_key, TOKEN_SPEED if line.tokens else STEP_SPEED, (line.tokens or 1) / line.seconds)


def _list_figures(line: StreamLine) -> Iterator[tuple[str, Any]]:
    if isinstance(line, TrainingEvent):
        yield line.kind, line.words
    elif isinstance(line, ArmCost):
        yield from _list_cost_figures(line)
    else:
        for name in _FIGURE_FIELDS[type(line)]:
            yield getattr(line, "name", name), getattr(line, name)


def _list_cost_figures(cost: ArmCost) -> Iterator[tuple[str, Any]]:
    """Yields the figures of a cost by name. An unknown figure is None."""
    yield from ((f"kept {name}", size) for name, size in cost.kept)
    if cost.memory is not None:
        yield "peak_memory", cost.memory.peak
        yield DEVICE_PEAK_MEMORY, cost.memory.on_device
        yield f"{DEVICE_PEAK_MEMORY} why", cost.memory.off_device or None
        yield from ((f"peak_memory {name}", size) for name, size in cost.memory.roles)
    if cost.energy is not None:
        yield from (("joules_per_step", joules) for joules in energy_samples(cost.energy))
        yield "energy_source", cost.energy.source
        yield "energy why", cost.energy.why or None
    if cost.capacity is not None:
        yield "max_batch", cost.capacity.batch
        yield from (("seconds_at_max_batch", seconds) for seconds in cost.capacity.seconds)
    yield "why", cost.why or None
