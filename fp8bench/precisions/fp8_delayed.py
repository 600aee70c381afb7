"""fp8-delayed: the recipe that FP8 training began with."""

from __future__ import annotations

from fp8bench.formats.recipes import LONGEST_HISTORY, MOST_MARGIN, Amax, Delayed, Recipe, Treatment
from fp8bench.formats.scalings import TENSOR
from fp8bench.nn.shared_precisions import ACCUMULATOR, HIGH_WEIGHT_GRADIENT, RecipePrecision, formats_option
from fp8bench.protocols.axes import Option, one_of, whole_number
from fp8bench.registry import precisions


@precisions.register("fp8-delayed")
class Fp8Delayed(RecipePrecision):
    """A scale that is known before the tensor is: nothing has to be read twice, and what outgrows it saturates."""

    name = "fp8-delayed"
    summary = (
        "E4M3 inputs and weights, E5M2 gradients, one float32 scale a tensor from the largest of its last 1024 amaxes, "
        "elements to nearest even."
    )
    rank = 41
    words = "FP8"
    options = (
        Option("history", "amaxes that a scale comes from", "1024", whole_number(1, LONGEST_HISTORY),
               ("amax_history_len", "fp8_amax_history_len")),
        Option("algorithm", "what of them: the max, or the most_recent", Amax.MAX.value, one_of(*Amax),
               ("amax_compute_algo", "fp8_amax_compute_algo")),
        Option("margin", "scales are divided by 2^margin", "0", whole_number(0, MOST_MARGIN), ("fp8_margin",)),
        Option("interval", "casts between two scales", "1", whole_number(1, LONGEST_HISTORY), ("fp8_interval",)),
        formats_option("hybrid"), HIGH_WEIGHT_GRADIENT, ACCUMULATOR,
    )  # fmt: skip

    def made(self) -> Recipe:
        history, margin, interval = (int(self.chosen[name]) for name in ("history", "margin", "interval"))
        delayed = Delayed(history, Amax(str(self.chosen["algorithm"])), margin, interval)
        return self.recipe_of((Treatment(fmt, TENSOR) for fmt in self.formats), delayed)
