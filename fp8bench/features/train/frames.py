"""A training as pandas frames: the lines of its stream, and what every arm came to."""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import cached_property
from typing import TYPE_CHECKING

from fp8bench.features.train.data import costs_of, row_of
from fp8bench.features.train.values import (
    ArmCost,
    KeptTraining,
    L,
    LayerReading,
    StepFigure,
    StepRow,
    TrainingEvent,
    Validation,
)
from fp8bench.features.train.verdicts.summary import summaries_of
from fp8bench.features.train.verdicts.verdicts import verdicts_of

if TYPE_CHECKING:
    import pandas as pd

# Words that stand in every row: categories take a byte or two a row, and text fifty.
_REPEATED = ("arm", "layer", "role", "of", "name", "kind", "tensor")


@dataclass(frozen=True)
class TrainingFrames:
    """A training and its lines, a frame for each kind of them, made when it is first asked for; docs/outputs.md says
    what their columns hold."""

    training: KeptTraining

    @cached_property
    def arms(self) -> pd.DataFrame:
        """What every arm came to: a row an arm."""
        import pandas as pd

        kept = self.training
        found = verdicts_of(kept.training, kept.lines)
        return pd.DataFrame(
            {
                "arm": one.arm.name,
                "precision": one.arm.precision,
                "role": one.arm.role.value,
                "ranks": kept.training.request.ranks or 1,
                "parallel": kept.training.request.settings.parallel,
                "amax_group": one.arm.taken(kept.training.request.settings).amax_group,
                **row_of(one, found),
            }
            for one in summaries_of(kept, found)
        )

    @cached_property
    def steps(self) -> pd.DataFrame:
        """A row a step of an arm in a seed."""
        return _lines(self.training, StepRow)

    @cached_property
    def readings(self) -> pd.DataFrame:
        """A row a tensor of a layer in a watched step."""
        return _lines(self.training, LayerReading)

    @cached_property
    def figures(self) -> pd.DataFrame:
        """A row a further figure of a watched step."""
        return _lines(self.training, StepFigure)

    @cached_property
    def validations(self) -> pd.DataFrame:
        """A row a look at text that was never trained on, perplexities included."""
        found = _lines(self.training, Validation)
        seen = self.training.of(Validation)
        by_byte = [one.perplexity_by_byte for one in seen]
        return found.assign(perplexity=[one.perplexity for one in seen], perplexity_by_byte=by_byte)

    @cached_property
    def costs(self) -> pd.DataFrame:
        """What each arm takes alone: a row a figure: bytes, joules of a step, batches and reasons."""
        import pandas as pd

        found = [(one.arm, *figure) for one in self.training.of(ArmCost) for figure in costs_of(one)]
        return pd.DataFrame(found, columns=["arm", "figure", "value"])

    @cached_property
    def events(self) -> pd.DataFrame:
        """A row for whatever happened."""
        return _lines(self.training, TrainingEvent)


def _lines(kept: KeptTraining, kind: type[L]) -> pd.DataFrame:
    import pandas as pd

    found = kept.of(kind)
    columns = {field.name: [getattr(line, field.name) for line in found] for field in fields(kind)}
    return pd.DataFrame(columns).astype({name: "category" for name in _REPEATED if name in columns})
