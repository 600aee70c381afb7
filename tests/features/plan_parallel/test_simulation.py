"""The formula of a step's time agrees with a simulation that walks through the step layer by layer."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from fp8bench.features.plan_parallel.formulas import (
    Checkpointing,
    DecoderModel,
    ParallelLayout,
    StepLoad,
    Topology,
    predict_pace,
)
from tests.counts import for_each

LAYERS = 200
# A vocabulary of one, so that only layers matter.
MODEL = DecoderModel("layers", vocabulary=1, width=64, layers=LAYERS, heads=8, key_heads=8, hidden=256, gated=False)
RATE = 1e12


@dataclass
class Link:
    """Sends one thing after the other, in the order in which they were asked for."""

    free: float = 0.0

    def send(self, now: float, seconds: float) -> float:
        self.free = max(self.free, now) + seconds
        return self.free


def fetch(now: float, sends: list[tuple[Link, float]]) -> float:
    return max([now, *(link.send(now, seconds) for link, seconds in sends)])


def order_of(stage: int, stages: int, pieces: int) -> list[tuple[str, int]]:
    """Passes of a stage in the 1F1B schedule; a single stage alternates forward and backward."""
    ahead = min(pieces, stages - stage - 1)
    order = [("forward", piece) for piece in range(ahead)]
    for piece in range(pieces - ahead):
        order += [("forward", ahead + piece), ("backward", piece)]
    return [*order, *(("backward", piece) for piece in range(pieces - ahead, pieces))]


def simulate(layout: ParallelLayout, load: StepLoad, links: Topology) -> float:
    """Simulates all passes of all stages: a layer's product waits for its weights, a stage for its neighbour."""
    stages, pieces = layout.pipeline, load.micro_batches
    layers = LAYERS // stages
    tokens = load.local * load.sequence / pieces / layout.context
    recomputes = load.checkpointing is Checkpointing.FULL
    scores = 2 * MODEL.width * load.sequence * tokens / (0.55 * RATE)
    forward = 2 * MODEL.block_products * tokens / RATE + scores
    backward = (3 if recomputes else 2) * (forward - scores) + (3.5 if recomputes else 2.5) * scores
    ranks = layout.shards * layout.context
    piece = MODEL.block * (ranks - 1) / ranks / links.link(ranks)
    copied = MODEL.block / ranks * (layout.copies - 1) / layout.copies / links.link(layout.gpus)
    ring, back = (4 * copied, 2 * copied) if load.zero_one else (8 * copied, 0.0)
    inner, outer = [Link() for _ in range(stages)], [Link() for _ in range(stages)]
    if links.link(ranks) == links.link(layout.gpus):
        outer = inner
    queues = [order_of(stage, stages, pieces) for stage in range(stages)]
    clocks, done, end = [0.0] * stages, dict[tuple[str, int, int], float](), 0.0
    while any(queues):
        for stage, queue in enumerate(queues):
            while queue:
                kind, number = queue[0]
                neighbour = stage - 1 if kind == "forward" else stage + 1
                neighbour_end = done.get((kind, number, neighbour), None if 0 <= neighbour < stages else 0.0)
                if neighbour_end is None:
                    break
                queue.pop(0)
                now = max(clocks[stage], neighbour_end)
                first, last = (kind, number) == ("forward", 0), (kind, number) == ("backward", pieces - 1)
                asked = 0.0 if first else now
                sends = [(inner[stage], 2 * piece)] if ranks > 1 and (first or stages == 1) else []
                sends += [(outer[stage], back)] if first and back else []
                ready = fetch(asked, sends)
                for layer in range(layers):
                    start = max(now, ready)
                    if layer + 1 < layers:
                        ready = fetch(asked if first else start, sends)  # one layer ahead
                    now = start + (forward if kind == "forward" else backward)
                    if kind == "backward" and ranks > 1 and (last or stages == 1):
                        end = max(end, inner[stage].send(now, 4 * piece))
                    if last and layout.copies > 1:
                        end = max(end, outer[stage].send(now, ring))
                clocks[stage], done[kind, number, stage] = now, now
    return max(end, *clocks)


LAYOUTS = {
    "copies": ParallelLayout(copies=8),
    "copies between nodes": ParallelLayout(copies=16),
    "shards": ParallelLayout(shards=8),
    "shards between nodes": ParallelLayout(shards=16),
    "both": ParallelLayout(copies=2, shards=8),
    "stages and copies": ParallelLayout(copies=2, pipeline=4),
    "stages and shards": ParallelLayout(shards=2, pipeline=4),
}


@for_each("name", list(LAYOUTS))
@for_each("tokens", [128, 4096])
@for_each("pieces", [1, 4, 16])
@for_each("zero_one", [False, True])
@for_each("level", [Checkpointing.NONE, Checkpointing.FULL])
def test_the_formula_is_what_a_walk_through_the_step_takes(
    name: str, tokens: int, pieces: int, zero_one: bool, level: Checkpointing
) -> None:
    layout, links = LAYOUTS[name], Topology(8, 1e9, 4e9, 1e9, RATE, RATE)
    load = StepLoad(128, pieces * tokens // 128, pieces, checkpointing=level, zero_one=zero_one)
    pace = predict_pace(MODEL, layout, load, links)
    assert pace.step == pytest.approx(simulate(layout, load, links), rel=0.03)


def test_only_the_last_micro_batch_hides_the_sum_of_gradients() -> None:
    layout, links = LAYOUTS["copies between nodes"], Topology(8, 1e9, 4e9, 1e9, RATE, RATE)
    one, sixteen = (predict_pace(MODEL, layout, StepLoad(128, 8 * pieces, pieces), links) for pieces in (1, 16))
    assert one.exposed == pytest.approx(sixteen.exposed)
    assert one.exposed == pytest.approx(one.copies - one.products * 2 / 3, rel=0.06)
    assert sixteen.copies < sixteen.products * 2 / 3
