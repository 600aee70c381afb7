"""The suite early_exit: a row leaves a stack of blocks as soon as a block is confident about it. So the data decides
how much work there is.
"""

from __future__ import annotations

import math
from itertools import product
from typing import TYPE_CHECKING

from fp8bench.formats.hardware import refused
from fp8bench.model import DeviceFacts, Scalars, Support, Work
from fp8bench.nn import shared_workloads as shared
from fp8bench.nn.layer_workloads import LayerWorkload
from fp8bench.protocols import Grid, Layer, Precision, Setup
from fp8bench.protocols.axes import VALUES, Axis, read_integers
from fp8bench.registry import workloads

if TYPE_CHECKING:
    import torch
    from torch import nn

    from fp8bench.nn.exercise import LayerExercise
    from fp8bench.nn.linear import ChooseArithmetic

_HELD_EXITS_CHOICE = "held"
_OWN_EXITS_CHOICE = "own"
_MAX_EARLY_EXIT_PERCENT = 90


def count_rows_by_block(params: Scalars) -> list[int]:
    """Returns how many rows enter each block in the exact (fp64) pass. The list ends with the first block that gets no
    rows, or with the last block.
    """
    rows = [int(params["tokens"])]
    staying_row_share = 1 - int(params["leaving"]) / 100
    while len(rows) < int(params["depth"]) and rows[-1]:
        # At least one row leaves after each block.
        rows.append(math.ceil((rows[-1] - 1) * staying_row_share))
    return rows


@workloads.register("early_exit")
class EarlyExits(LayerWorkload):
    """Times a classifier whose rows leave after the first block that is confident about them.

    In low precision, a row near the confidence threshold may leave after a different block, and a step with less work
    is faster for that reason alone. With exits=held, the default, the same number of rows leaves after each block as in
    the exact pass. So all precisions compute the same products, and their speed-up gets a verdict.

    With exits=own, the confidence in each precision decides, as in production. The host waits for the number of
    remaining rows. A case whose products differ from those of the reference is labelled work-mismatch. The declared
    FLOPs are those of the exact pass.
    """

    name = "early_exit"
    summary = "rows leave a stack of blocks when a head is confident; all precisions share exits, or each has its own"
    linear_layers = True
    own_paths = True
    layer_kinds = ("up", "down")
    batch_axis = "tokens"
    history = Grid(
        cpu={"width": ("128",), "exits": (_HELD_EXITS_CHOICE,)},
        gpu={"width": ("4096",), "exits": (_HELD_EXITS_CHOICE,)},
        phases=("cast", "gemm", "elementwise"),
        errors=("output_error",),
        per="tokens",
    )

    def axes(self, facts: DeviceFacts) -> tuple[Axis, ...]:
        tokens, width, hidden = ("8192", "4096", "16384") if facts.accelerated else ("256", "128", "512")
        return (
            Axis.count("tokens", "rows of the input", tokens, high=1 << 18),
            Axis.count("width", "features of a row", width, high=1 << 16),
            Axis.count("hidden", "features between a block's products", hidden, high=1 << 18),
            Axis.count("depth", "blocks that a row passes if it never leaves early", "6", low=2, high=256),
            Axis.count("classes", "number of classes that each block's head can predict", "64", low=2, high=1 << 17),
            Axis.count(
                "leaving",
                "percentage of a block's rows that exit after it in the exact pass",
                "25",
                low=1,
                high=_MAX_EARLY_EXIT_PERCENT,
            ),
            Axis.each(
                "exits",
                "held: drawn from the seed, the same in every precision; own: by each precision's confidence",
                _HELD_EXITS_CHOICE,
                _OWN_EXITS_CHOICE,
            ),
            VALUES,
        )

    def work(self, params: Scalars) -> Work:
        tokens, width, hidden, depth = read_integers(params, "tokens", "width", "hidden", "depth")
        # The least memory: weights in fp32, and two bytes for each value of a row.
        least_memory_bytes = 8.0 * depth * width * hidden + 2.0 * tokens * (2 * width + hidden)
        flops = 2.0 * sum(count_rows_by_block(params)) * width * (2 * hidden + int(params["classes"]))
        return Work(flops, tokens, least_memory=least_memory_bytes)

    def layers(self, params: Scalars) -> tuple[Layer, ...]:
        block_kind_pairs = product(range(int(params["depth"])), self.layer_kinds)
        return tuple(Layer(f"blocks.{number}.{layer_kind}", layer_kind) for number, layer_kind in block_kind_pairs)

    def support(self, params: Scalars, precision: Precision, facts: DeviceFacts) -> Support:
        support = precision.support(facts)
        if params["exits"] == _OWN_EXITS_CHOICE and shared.explain_missing_errors(params):
            return refused(f"values={VALUES.of(params)} make all rows alike, so that all leave at once: exits=held")
        width, hidden = read_integers(params, "width", "hidden")
        return shared.refuse_unfit_sizes(
            support, precision, 0, (width, hidden), False, f"width={width}, hidden={hidden}"
        )

    def layer(self, params: Scalars, choose: ChooseArithmetic) -> nn.Module:
        from fp8bench.nn.early_exit import EarlyExit

        width, hidden, depth, class_count = read_integers(params, "width", "hidden", "depth", "classes")
        return EarlyExit(width, hidden, depth, class_count, choose)

    def shapes(self, params: Scalars) -> list[tuple[int, ...]]:
        return [(int(params["tokens"]), int(params["width"]))]

    def exercise(self, setup: Setup, choose: ChooseArithmetic, carrier: torch.dtype) -> LayerExercise:
        import torch

        from fp8bench.nn import early_exit
        from fp8bench.nn.arithmetics import PlainArithmetic

        # 1. Make the timed layer, and compute the number of rows for each of its blocks.
        state = super().exercise(setup, choose, carrier)
        rows = count_rows_by_block(setup.params)
        exact_dtype = torch.float64
        assert isinstance(state.layer, early_exit.EarlyExit)
        # 2. With exits=held, rows exit by a schedule that ignores their values, so all precisions do the same work.
        if setup.params["exits"] == _HELD_EXITS_CHOICE:
            state.layer.exit_rule = early_exit.make_scheduled_exit_rule(rows, setup.seed, state.inputs[0].device)
            return state
        # 3. With exits=own, use the confidence thresholds of the exact pass. In low precision a row may leave after
        # another block.
        exact = (
            state
            if carrier is exact_dtype
            else super().exercise(setup, lambda name: PlainArithmetic(exact_dtype), exact_dtype)
        )
        assert isinstance(exact.layer, early_exit.EarlyExit)
        state.layer.exit_rule = early_exit.make_threshold_exit_rule(exact.layer, exact.inputs[0], rows)
        return state

    def error(self, setup: Setup) -> dict[str, float]:
        """Compares the logits with those of the exact pass. Adds the share of rows that leave the model after a
        different block than in the exact pass, and the mean number of blocks of a row.
        """
        from fp8bench.nn.early_exit import EarlyExit

        state = self.prepare(setup)
        exact = self.exact(setup)
        errors = state.measure_errors(exact, setup.settles)
        assert isinstance(state.layer, EarlyExit) and isinstance(exact.layer, EarlyExit)
        exit_depths = state.layer.count_blocks(*state.inputs)
        return {
            **errors,
            "exits_differ_percent": 100
            * float((exit_depths != exact.layer.count_blocks(*exact.inputs)).double().mean()),
            "mean_depth": float(exit_depths.double().mean()),
        }
