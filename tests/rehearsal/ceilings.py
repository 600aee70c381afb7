"""How many launches a step may take, by phase, counted by hand."""

from __future__ import annotations

from dataclasses import dataclass

from fp8bench.formats.grids import E4M3, E8M0
from fp8bench.formats.recipes import Recipe
from fp8bench.formats.scale_layouts import TILE_ROWS
from fp8bench.model import Case
from fp8bench.nn.sizes import SERVED_SIZES, SIZES
from fp8bench.registry import precisions

# A weight's gradient becomes float32, and the head's weights bf16.
CONVERTED = 1
# All experts share one product, on the first GPU that has the precision.
GROUPED = {"bf16", "fp8-rowwise", "mxfp8", "mxfp8:scale=floor"}
# The largest magnitudes of all weights, in one call.
ALL_AMAXES = 3


@dataclass(frozen=True)
class Launches:
    """How many launches a cast takes: of an input or gradient in one orientation and in both, of a weight, of one with
    a known maximum, of the way back to float32; and how many more where rows do not fill tiles of scales."""

    one: int
    both: int
    weight: int
    weight_both: int
    known: int
    restored: int = 2
    untiled: int = 0


# The largest magnitude, the scale and its inverse, the codes: one kernel writes both orientations.
A_TENSOR = Launches(one=3, both=3, weight=3, weight_both=3, known=2)
# Each orientation has separate scales; one kernel computes and applies them, for both if requested.
A_ROW = Launches(one=1, both=1, weight=1, weight_both=1, known=1)
# The same for 128 elements; for a weight's squares the scales, the codes, and zero padding.
A_BLOCK = Launches(one=1, both=1, weight=3, weight_both=3, known=3, restored=3)
# Codes and scales of 32 elements by one kernel, in tiles; otherwise two operations move scales there. Back: scales out
# of tiles, looked up, expanded; codes times scales.
AN_MX = Launches(one=1, both=1, weight=1, weight_both=1, known=1, restored=7, untiled=2)
# The largest magnitude, the tensor's scale with seed keys, codes and scales of 16, for both orientations at once,
# rotated in the pass that finds both largest magnitudes. Back: MX's five for scales, times the tensor's; two codes per
# byte looked up, three each; codes times scales.
AN_NVFP4 = Launches(one=3, both=3, weight=3, weight_both=3, known=2, restored=13, untiled=2)
BY_EXTENTS = {
    frozenset({(0, 0, None)}): A_TENSOR,
    frozenset({(1, 0, None)}): A_ROW,
    frozenset({(1, 128, None), (128, 128, None)}): A_BLOCK,
    frozenset({(1, 32, E8M0)}): AN_MX,
    frozenset({(1, 16, E4M3), (16, 16, E4M3)}): AN_NVFP4,
    frozenset({(1, 16, E4M3)}): AN_NVFP4,
}


def of_cast(mode: str) -> Launches | None:
    recipe = getattr(precisions.get(mode), "recipe", None)
    if not isinstance(recipe, Recipe) or recipe.high_weight_gradient:
        return None
    scalings = [one.scaling for one in recipe.treatments if one.scaling is not None]
    return BY_EXTENTS.get(frozenset((one.rows, one.columns, one.scale) for one in scalings))


def of_casts(case: Case) -> int | None:
    """The maximum launches of all casts of a step; None if not promised."""
    cast, params = of_cast(case.precision), dict(case.params)
    if cast is None:
        return None
    tensors, micro_batches = int(params.get("tensors", 0)), int(params.get("micro_batches", 0))
    match case.workload:
        case "gemm":
            weights = params["product"] != "weight-gradient"
            untiled = cast.untiled if int(params["m"]) % TILE_ROWS else 0
            copied = str(params.get("layout", "")).count("strided")  # every second element is not a separate matrix
            return cast.one + untiled + copied + (cast.weight if weights else cast.one)
        case "cast" if params["direction"] == "from":
            return cast.restored + (params["source"] != "fp32")
        case "cast" | "numerics":
            return cast.one
        case "data":
            return cast.one + (cast.untiled if int(params["batch"]) % TILE_ROWS else 0)
        case "accumulate":
            return tensors * (micro_batches * cast.one + (micro_batches - 1) * cast.restored)
        case "attention" | "mlp":  # two layers: inputs, weights and gradients, and conversion of weight gradients
            return 2 * (2 * cast.both + cast.weight_both + CONVERTED)
        case "moe":
            return _of_experts(case, cast)
        case "decode" | "prefill":  # only inputs: weights are cast before the first step
            rows = int(params["batch"]) * (1 if case.workload == "decode" else int(params["context"]))
            untiled = cast.untiled if rows % TILE_ROWS else 0
            return 4 * SERVED_SIZES[str(params["size"])].layers * (cast.one + untiled)
        case "transformer" if params["checkpointing"] == "no":
            return _of_model(case, cast, micro_batches)
    return None


def _of_experts(case: Case, cast: Launches) -> int:
    """Counts two layers per expert.

    Grouped products cast inputs and gradients at once, and part by part for weight gradients; codes and scales of
    weights and parts are concatenated.
    """
    params = dict(case.params)
    experts, training = int(params["experts"]), params["pass"] == "training"
    untiled = 0 if params["load"] == "uniform" else cast.untiled  # alternating as well
    rows = 2 * (cast.both + 2 * untiled) if training else cast.one + cast.untiled
    weight = cast.weight_both + CONVERTED if training else 0
    one_by_one = 2 * experts * (rows + weight)
    parts = 2 * experts * cast.one + 2 * 2 + 2 + experts * cast.weight_both + CONVERTED if training else 0
    together = 2 * ((2 if training else 1) * cast.one + 2 + parts)
    return together if case.precision in GROUPED else one_by_one


def _of_model(case: Case, cast: Launches, micro_batches: int) -> int:
    """Counts four layers per block, and the head, whose weights are cast to the carrier."""
    params = dict(case.params)
    layers = 4 * SIZES[str(params["size"])].layers
    converted = (layers + 1) * CONVERTED * micro_batches
    inputs_and_gradients = 2 * layers * cast.both * micro_batches
    if params["weights"] == "recast":
        return inputs_and_gradients + converted + micro_batches * (layers * cast.weight_both + CONVERTED)
    known = ALL_AMAXES if cast.known < cast.weight_both else 0
    return inputs_and_gradients + converted + layers * cast.known + known + CONVERTED


# A block forward: two norms through float32, two sums, an activation. Backward: two kernels per norm besides its
# conversions, gradients of sums and activation, and concatenated queries, keys and values.
BLOCK_FORWARD, BLOCK_BACKWARD = 2 * 3 + 2 + 1, 2 * 4 + 2 + 1 + 1
# A served block: two norms of nine kernels (three conversions to and from float32, its weight's included), rotated
# queries and keys, cache writes, two sums, SiLU and the gate; for a prompt also concatenated heads.
SERVED_NORM, SERVED_BLOCK = 9, 2 * 9 + 2 * 7 + 2 + 2 + 2
# The embedding's gradient sorts tokens first; then the last norm, positions, and the float32 loss.
EMBEDDING, REST = 25, 7 + 6 + 10
ATTENTION_FORWARD, ATTENTION_BACKWARD = 1, 3


def of_phases(case: Case) -> dict[str, int]:
    """The most launches by phase; a phase without an entry has no ceiling."""
    params, casts = dict(case.params), of_casts(case)
    ceilings = {} if casts is None else {"cast": casts}
    attention = ATTENTION_FORWARD + ATTENTION_BACKWARD
    match case.workload:
        case "gemm":
            ceilings["gemm"] = 1
        case "moe":  # and the router's
            products = 2 * (1 if case.precision in GROUPED else int(params["experts"])) + 1
            ceilings["gemm"] = products * (3 if params["pass"] == "training" else 1)
        case "mlp":  # SiLU and the gate, their gradients, and concatenated halves
            ceilings |= {"gemm": 2 * 3, "elementwise": 2 + 3 + 1}
        case "attention":  # concatenated heads; repeated keys and values for shared ones
            ceilings |= {"gemm": 2 * 3, "elementwise": 3, "attention": attention + 2 * 2}
        case "diffusion":  # for a DiT: time and each end twice, every block's modulation and the last one's
            steps, blocks = int(params["steps"]), int(params["layers"])
            ceilings |= {"gemm": steps * (4 + 4 * blocks + blocks + 1), "accumulate": steps * 3}
            ceilings["attention"] = steps * blocks * ATTENTION_FORWARD
        case "decode" | "prefill":  # repeated keys and values; the embedding, the last norm, and high logits
            blocks = SERVED_SIZES[str(params["size"])].layers
            block = SERVED_BLOCK + (case.workload == "prefill")
            ceilings |= {"gemm": 4 * blocks + 1, "elementwise": blocks * block + SERVED_NORM + 2}
            ceilings["attention"] = blocks * (ATTENTION_FORWARD + 2)
        case "transformer":
            config, times = SIZES[str(params["size"])], int(params["micro_batches"])
            blocks, ends = config.layers, EMBEDDING + REST + config.tied  # both gradients of a tied weight are added
            recomputes = int(params["checkpointing"] == "blocks")
            ceilings |= {
                "data_load": times * 3,  # the copy, and tokens and targets out of it
                "gemm": times * (4 * blocks * (3 + recomputes) + 3),
                "elementwise": times * (blocks * (BLOCK_FORWARD * (1 + recomputes) + BLOCK_BACKWARD) + ends),
                "attention": times * blocks * (attention + ATTENTION_FORWARD * recomputes),
                "accumulate": 1 + times,
                "optimizer_step": 2,
            }
    return ceilings
