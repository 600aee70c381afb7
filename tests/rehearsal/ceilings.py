"""How many launches a step may take, by phase, counted by hand."""

from __future__ import annotations

from dataclasses import dataclass

from fp8bench.formats.grids import E4M3, E8M0
from fp8bench.formats.recipes import Recipe
from fp8bench.formats.scale_layouts import TILE_ROWS
from fp8bench.model import Case
from fp8bench.nn.sizes import SERVED_SIZES, SIZES
from fp8bench.registry import precisions

# A weight's gradient goes into float32, and the head's weights into bf16.
CONVERTED = 1
# All experts have one product in common, on the first GPU that has the precision.
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


# The largest magnitude, the scale and its inverse, the codes: those of both orientations are written by one kernel.
A_TENSOR = Launches(one=3, both=3, weight=3, weight_both=3, known=2)
# Each orientation has scales of its own, and one kernel finds and applies them, those of both if it is asked for both.
A_ROW = Launches(one=1, both=1, weight=1, weight_both=1, known=1)
# The same of 128 elements; of a weight's squares the scales, the codes, and memory that is filled up with zeros.
A_BLOCK = Launches(one=1, both=1, weight=3, weight_both=3, known=3, restored=3)
# Codes and scales of 32 elements by one kernel, in tiles; else two operations bring scales there.
# Back: scales out of their tiles, looked up, one for every element; codes, times those.
AN_MX = Launches(one=1, both=1, weight=1, weight_both=1, known=1, restored=7, untiled=2)
# The largest magnitude, the tensor's scale with the keys of seeds, the codes and scales of 16: of both orientations at
# once, rotated in the pass that finds the largest magnitudes of both. Back: MX's five of scales, times the tensor's;
# two codes out of a byte and looked up, three each; codes, times scales.
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
    """Returns the most that all casts of a step may launch; None where nothing is promised."""
    cast, params = of_cast(case.precision), dict(case.params)
    if cast is None:
        return None
    tensors, micro_batches = int(params.get("tensors", 0)), int(params.get("micro_batches", 0))
    match case.workload:
        case "gemm":
            weights = params["product"] != "weight-gradient"
            untiled = cast.untiled if int(params["m"]) % TILE_ROWS else 0
            copied = str(params.get("layout", "")).count("strided")  # every second element is no matrix of its own
            return cast.one + untiled + copied + (cast.weight if weights else cast.one)
        case "cast" if params["direction"] == "from":
            return cast.restored + (params["source"] != "fp32")
        case "cast" | "numerics":
            return cast.one
        case "data":
            return cast.one + (cast.untiled if int(params["batch"]) % TILE_ROWS else 0)
        case "accumulate":
            return tensors * (micro_batches * cast.one + (micro_batches - 1) * cast.restored)
        case "attention" | "mlp":  # two layers: inputs, weights and gradients, and the weights' gradients converted
            return 2 * (2 * cast.both + cast.weight_both + CONVERTED)
        case "moe":
            return _of_experts(case, cast)
        case "decode" | "prefill":  # inputs alone: weights are cast before the first step
            rows = int(params["batch"]) * (1 if case.workload == "decode" else int(params["context"]))
            untiled = cast.untiled if rows % TILE_ROWS else 0
            return 4 * SERVED_SIZES[str(params["size"])].layers * (cast.one + untiled)
        case "transformer" if params["checkpointing"] == "no":
            return _of_model(case, cast, micro_batches)
    return None


def _of_experts(case: Case, cast: Launches) -> int:
    """Counts two layers of each expert. Grouped products cast inputs and gradients at once, and again part by part for
    the weights' gradients; codes and scales of weights and of parts are concatenated."""
    params = dict(case.params)
    experts, training = int(params["experts"]), params["pass"] == "training"
    untiled = 0 if params["load"] == "uniform" else cast.untiled  # by turns as well
    rows = 2 * (cast.both + 2 * untiled) if training else cast.one + cast.untiled
    weight = cast.weight_both + CONVERTED if training else 0
    one_by_one = 2 * experts * (rows + weight)
    parts = 2 * experts * cast.one + 2 * 2 + 2 + experts * cast.weight_both + CONVERTED if training else 0
    together = 2 * ((2 if training else 1) * cast.one + 2 + parts)
    return together if case.precision in GROUPED else one_by_one


def _of_model(case: Case, cast: Launches, micro_batches: int) -> int:
    """Counts four layers in each block, and the head, whose weights are cast to the carrier."""
    params = dict(case.params)
    layers = 4 * SIZES[str(params["size"])].layers
    converted = (layers + 1) * CONVERTED * micro_batches
    inputs_and_gradients = 2 * layers * cast.both * micro_batches
    if params["weights"] == "recast":
        return inputs_and_gradients + converted + micro_batches * (layers * cast.weight_both + CONVERTED)
    known = ALL_AMAXES if cast.known < cast.weight_both else 0
    return inputs_and_gradients + converted + layers * cast.known + known + CONVERTED


# Of a block forward: two norms by way of float32, two sums, an activation. Backward: of a norm two kernels more than
# its conversions, the sums' gradients, the activation's, and queries, keys and values put together.
BLOCK_FORWARD, BLOCK_BACKWARD = 2 * 3 + 2 + 1, 2 * 4 + 2 + 1 + 1
# Of a served block: two norms of nine kernels (three to and from float32, its weight's among them), queries and keys
# turned, keys and values into the cache, two sums, SiLU and the gate; of a prompt heads put together, too.
SERVED_NORM, SERVED_BLOCK = 9, 2 * 9 + 2 * 7 + 2 + 2 + 2
# The embedding's sum of gradients sorts tokens first; beside it the last norm, positions, and the loss in float32.
EMBEDDING, REST = 25, 7 + 6 + 10
ATTENTION_FORWARD, ATTENTION_BACKWARD = 1, 3


def of_phases(case: Case) -> dict[str, int]:
    """Returns the most launches by phase; a phase without an entry has no ceiling."""
    params, casts = dict(case.params), of_casts(case)
    found = {} if casts is None else {"cast": casts}
    attention = ATTENTION_FORWARD + ATTENTION_BACKWARD
    match case.workload:
        case "gemm":
            found["gemm"] = 1
        case "moe":  # and the router's
            products = 2 * (1 if case.precision in GROUPED else int(params["experts"])) + 1
            found["gemm"] = products * (3 if params["pass"] == "training" else 1)
        case "mlp":  # SiLU and the gate, their gradients, and both halves put together
            found |= {"gemm": 2 * 3, "elementwise": 2 + 3 + 1}
        case "attention":  # heads put together; keys and values repeated for those that share them
            found |= {"gemm": 2 * 3, "elementwise": 3, "attention": attention + 2 * 2}
        case "diffusion":  # a DiT's: time and each end twice, every block's modulation and that of the last
            steps, blocks = int(params["steps"]), int(params["layers"])
            found |= {"gemm": steps * (4 + 4 * blocks + blocks + 1), "accumulate": steps * 3}
            found["attention"] = steps * blocks * ATTENTION_FORWARD
        case "decode" | "prefill":  # keys and values repeated; the embedding, the last norm, and logits where they stay
            blocks = SERVED_SIZES[str(params["size"])].layers
            block = SERVED_BLOCK + (case.workload == "prefill")
            found |= {"gemm": 4 * blocks + 1, "elementwise": blocks * block + SERVED_NORM + 2}
            found["attention"] = blocks * (ATTENTION_FORWARD + 2)
        case "transformer":
            config, times = SIZES[str(params["size"])], int(params["micro_batches"])
            blocks, ends = config.layers, EMBEDDING + REST + config.tied  # both gradients of a tied weight are added
            again = int(params["checkpointing"] == "blocks")
            found |= {
                "data_load": times * 3,  # the copy, and tokens and targets out of it
                "gemm": times * (4 * blocks * (3 + again) + 3),
                "elementwise": times * (blocks * (BLOCK_FORWARD * (1 + again) + BLOCK_BACKWARD) + ends),
                "attention": times * blocks * (attention + ATTENTION_FORWARD * again),
                "accumulate": 1 + times,
                "optimizer_step": 2,
            }
    return found
