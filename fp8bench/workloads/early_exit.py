"""Rows that leave a stack of blocks at the first confident block: control flow that depends on the data."""

from __future__ import annotations

import math
from itertools import product
from typing import TYPE_CHECKING

from fp8bench.formats.hardware import refused
from fp8bench.model import DeviceFacts, Scalars, Support, Work
from fp8bench.nn import shared_workloads as shared
from fp8bench.nn.layer_workloads import LayerWorkload
from fp8bench.protocols import Grid, Layer, Precision, Setup
from fp8bench.protocols.axes import VALUES, Axis
from fp8bench.registry import workloads

if TYPE_CHECKING:
    import torch
    from torch import nn

    from fp8bench.nn.exercise import Exercise
    from fp8bench.nn.linear import Choose

_HELD = "held"
_OWN = "own"
_MOST_PERCENT = 90


def rows_of_blocks(params: Scalars) -> list[int]:
    """Returns how many rows each block has in the exact pass, up to the last block that has any."""
    rows = [int(params["tokens"])]
    share = 1 - int(params["leaving"]) / 100
    while len(rows) < int(params["depth"]) and rows[-1]:
        rows.append(math.ceil((rows[-1] - 1) * share))
    return rows


@workloads.register("early_exit")
class EarlyExits(LayerWorkload):
    """A classifier whose rows leave after the first block that makes them certain.

    In low precision a row near its threshold leaves elsewhere, and a step that does less is faster for that reason
    alone. So exits are held by default: after each block as many rows leave as in the exact pass, in every precision,
    which then does the same products and gets a verdict. With exits=own each precision's rows leave by themselves, as
    in service: the host waits for the number of remaining rows, the tape shows the products of each, and if they differ
    from the reference's the case is labelled work-mismatch. The declared FLOPs are those of the exact pass.
    """

    name = "early_exit"
    summary = "blocks that rows leave when a head is sure: exits held alike in all precisions, or each one's own"
    linear_layers = True
    own_paths = True
    layer_kinds = ("up", "down")
    batch_axis = "tokens"
    history = Grid(
        cpu={"width": ("128",), "exits": (_HELD,)},
        gpu={"width": ("4096",), "exits": (_HELD,)},
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
            Axis.count("depth", "blocks, if no row leaves ahead of the last", "6", low=2, high=256),
            Axis.count("classes", "of the head behind each block", "64", low=2, high=1 << 17),
            Axis.count(
                "leaving",
                "percent of the rows of a block that leave behind it in the exact pass",
                "25",
                low=1,
                high=_MOST_PERCENT,
            ),
            Axis.each(
                "exits",
                "held: drawn from the seed, the same in every precision; own: each precision's own",
                _HELD,
                _OWN,
            ),
            VALUES,
        )

    def work(self, params: Scalars) -> Work:
        tokens, width, hidden, depth = (int(params[name]) for name in ("tokens", "width", "hidden", "depth"))
        # fp32 weights; rows in two bytes, the least of any carrier.
        least = 8.0 * depth * width * hidden + 2.0 * tokens * (2 * width + hidden)
        flops = 2.0 * sum(rows_of_blocks(params)) * width * (2 * hidden + int(params["classes"]))
        return Work(flops, tokens, least_memory=least)

    def layers(self, params: Scalars) -> tuple[Layer, ...]:
        places = product(range(int(params["depth"])), self.layer_kinds)
        return tuple(Layer(f"blocks.{number}.{kind}", kind) for number, kind in places)

    def support(self, params: Scalars, precision: Precision, facts: DeviceFacts) -> Support:
        support = precision.support(facts)
        if params["exits"] == _OWN and shared.why_no_errors(params):
            return refused(f"values={VALUES.of(params)} make all rows alike, so that all leave at once: exits=held")
        width = int(params["width"])
        hidden = int(params["hidden"])
        return shared.require_fit(support, precision, 0, (width, hidden), False, f"width={width}, hidden={hidden}")

    def layer(self, params: Scalars, choose: Choose) -> nn.Module:
        from fp8bench.nn.early_exit import EarlyExit

        width, hidden, depth, classes = (int(params[name]) for name in ("width", "hidden", "depth", "classes"))
        return EarlyExit(width, hidden, depth, classes, choose)

    def shapes(self, params: Scalars) -> list[tuple[int, ...]]:
        return [(int(params["tokens"]), int(params["width"]))]

    def exercise(self, setup: Setup, choose: Choose, carrier: torch.dtype) -> Exercise:
        import torch

        from fp8bench.nn import early_exit
        from fp8bench.nn.arithmetics import PlainArithmetic

        # 1. Make the timed layer, and compute how many rows each of its blocks should get.
        state = super().exercise(setup, choose, carrier)
        rows = rows_of_blocks(setup.params)
        wide = torch.float64
        assert isinstance(state.layer, early_exit.EarlyExit)
        # 2. Held: rows leave by a schedule, independent of their values, so that precisions do equal work.
        if setup.params["exits"] == _HELD:
            device = state.inputs[0].device
            state.layer.exits = early_exit.scheduled_exits(rows, setup.seed, device)
            return state
        # 3. Thresholds of confidence from the exact pass, which a precision may cross elsewhere.
        exact = state if carrier is wide else super().exercise(setup, lambda name: PlainArithmetic(wide), wide)
        assert isinstance(exact.layer, early_exit.EarlyExit)
        state.layer.exits = early_exit.threshold_exits(exact.layer, exact.inputs[0], rows)
        return state

    def error(self, setup: Setup) -> dict[str, float]:
        """Compares the logits with which rows leave; adds the share of rows that leave elsewhere, and the mean
        depth."""
        from fp8bench.nn.early_exit import EarlyExit

        state = self.prepare(setup)
        exact = self.exact(setup)
        errors = state.errors(exact, setup.settles)
        assert isinstance(state.layer, EarlyExit) and isinstance(exact.layer, EarlyExit)
        depths = state.layer.depths(*state.inputs)
        right = exact.layer.depths(*exact.inputs)
        return {
            **errors,
            "exits_differ_percent": 100 * float((depths != right).double().mean()),
            "mean_depth": float(depths.double().mean()),
        }
