"""One long frame of a training: a row for each figure of an arm, a seed and a step.

CSV, boards, the page's curves, the terminal's table of last figures and the merging of ranks all read it. A new
`StepFigure` of a step appears in the CSV and on boards automatically; a row in FIGURES adds a chart, a column in the
terminal, and another way to combine the ranks' values than their mean.
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

# The second is of a loop whose tokens are unknown.
SPEED, PACE = "tokens_per_second", "steps_per_second"


class Row(NamedTuple):
    """One row of the frame. `line` is the kind of line that the figure is from, `of` the text of a validation."""

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
    """How a figure is shown. A point of its chart is the `pick` of the values since the previous point; without a
    `title` it has no chart. `window` describes a point, `unit` is that of the axis. `shared`: one value for all arms
    together. `show` formats a value for the terminal, which leaves it out without `heading`. `over_ranks` combines the
    values of all ranks."""

    name: str
    title: str = ""
    heading: str = ""
    show: Callable[[float], str] = "{:.3g}".format
    pick: Callable[[Sequence[float]], float] = lambda values: values[-1]
    folded: bool = True
    shared: bool = False
    unit: str = ""
    window: str = "the values of single steps"
    over_ranks: Callable[[Sequence[float]], float] | None = None


_FIGURES = (
    # Figures of every step.
    Figure("gradient_norm", "norm of the gradients, before clipping", "gradient norm", folded=False),
    Figure("update_ratio", "norm of the update over that of the weights", "update/weights", folded=False),
    Figure("parameter_norm", "norm of the weights", "weight norm"),
    Figure("clipped", "share of the gradients' norm that clipping took", "clipped", units.percent),
    Figure("loss_scale", "loss scale", "loss scale"),
    Figure("rate", "learning rate", "rate"),
    Figure(SPEED, "throughput in tokens/s", pick=statistics.median, window="of native arms, the median"),
    Figure(PACE, "throughput in steps/s", pick=statistics.median, window="the median"),
    # Figures of a watched step.
    Figure("memory", "memory in use", pick=max, shared=True, unit="B", window="in watched steps", over_ranks=max),
    Figure("watched_seconds", over_ranks=max),
    # Figures of a layer or a tensor in a watched step.
    Figure("output_amax", over_ranks=max),
    Figure("attention_score", over_ranks=max),
    Figure("batch_norm_drift", over_ranks=max),
)
FIGURES: dict[str, Figure] = {figure.name: figure for figure in _FIGURES}

# Fields that locate a figure, and are not figures.
_PLACES = ("arm", "seed", "step", "layer", "role", "of", "name")
_NAMES: Mapping[type, Sequence[str]] = {
    kind: [field.name for field in fields(kind) if field.name not in _PLACES]
    for kind in (StepRow, LayerReading, StepFigure, Validation)
}


def frame_of(arms: Iterable[Arm], lines: Iterable[StreamLine]) -> Iterator[Row]:
    """Yields every figure of every line. A speed is added to timed steps of native arms; for others it is
    meaningless."""
    native = {arm.name for arm in arms if arm.native}
    # Lines may lack some of these: a step has no layer, an event no text.
    for line in lines:
        of, layer, role, tensor = (getattr(line, name, "") for name in ("of", "layer", "role", "tensor"))
        place = (line.arm, line.seed, line.step, type(line).__name__, of, layer, str(role or tensor))
        for figure, value in _figures_of(line):
            yield Row(*place, figure, value)
        if isinstance(line, StepRow) and line.arm in native and line.seconds > 0:
            yield Row(*place, SPEED if line.tokens else PACE, (line.tokens or 1) / line.seconds)


def _figures_of(line: StreamLine) -> Iterator[tuple[str, Any]]:
    if isinstance(line, TrainingEvent):
        yield line.kind, line.words
    elif isinstance(line, ArmCost):
        yield from costs_of(line)
    else:
        for name in _NAMES[type(line)]:
            value = getattr(line, name)
            if value is not None:
                yield getattr(line, "name", name), value


def costs_of(cost: ArmCost) -> Iterator[tuple[str, Any]]:
    for name, size in cost.kept:
        yield f"kept {name}", size
    if cost.memory is not None:
        yield "peak_memory", cost.memory.peak
        if cost.memory.on_device is not None:
            yield DEVICE_PEAK_MEMORY, cost.memory.on_device
        if cost.memory.off_device:
            yield f"{DEVICE_PEAK_MEMORY} why", cost.memory.off_device
        for name, size in cost.memory.roles:
            yield f"peak_memory {name}", size
    if cost.energy is not None:
        for joules in energy_samples(cost.energy):
            yield "joules_per_step", joules
        yield "energy_source", cost.energy.source
        if cost.energy.why:
            yield "energy why", cost.energy.why
    if cost.capacity is not None:
        yield "max_batch", cost.capacity.batch
        yield from (("seconds_at_max_batch", seconds) for seconds in cost.capacity.seconds)
    if cost.why:
        yield "why", cost.why
