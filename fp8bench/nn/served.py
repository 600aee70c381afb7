"""Number formats of a served model's weights, keys and values, with their bytes, and the arms of a comparison.

An arm has a format for keys and values, a format for the weights of its blocks, and a dtype for everything else. This
module must not import torch, because planning imports it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from math import prod

from fp8bench.errors import UsageError
from fp8bench.formats import hardware
from fp8bench.formats.grids import E2M1, E4M3, Format
from fp8bench.formats.recipes import MX, NVFP4, ROW, TENSOR, Scaling, count_blocks
from fp8bench.model import DeviceFacts, Scalars, Support
from fp8bench.nn.sizes import SERVED_SIZES, GPTConfig, list_feed_forward_paths
from fp8bench.protocols import Precision

SERVED_PRECISION = "served"
OWN = "own"
CARRIER_BYTES = {"fp32": 4, "bf16": 2}


@dataclass(frozen=True)
class StorageFormat:
    """A number format for stored tensors: the bits of each number and the bytes of a scale.

    `scale_sharing` defines which numbers share a scale: 'all' numbers of a tensor, those of a 'head', those of a 'row',
    or those of a block along the row, given by its length. 0 stands for no scale. `tensor_scale_bytes` is the bytes of
    one more scale for the whole tensor. `fmt` and `scaling` are None for torch's dtypes and for integers.
    """

    bits: int
    scale_bytes: int = 0
    scale_sharing: str | int = 0
    tensor_scale_bytes: int = 0
    fmt: Format | None = None
    scaling: Scaling | None = None

    def count_bytes(self, rows: int, columns: int, heads: int = 1) -> int:
        blocks = (
            count_blocks(columns, self.scale_sharing)
            if isinstance(self.scale_sharing, int) and self.scale_sharing
            else 0
        )
        scales = {"all": 1, "head": heads, "row": rows}.get(str(self.scale_sharing), rows * blocks)
        # The codes of each row fill whole bytes.
        return rows * count_blocks(columns * self.bits, 8) + scales * self.scale_bytes + self.tensor_scale_bytes


CARRIER_FORMATS = {name: StorageFormat(8 * size) for name, size in CARRIER_BYTES.items()}
_FP8_ROW_STORAGE = StorageFormat(8, 4, "row", fmt=E4M3, scaling=ROW)
_BLOCK_FORMATS = {
    "mxfp4": StorageFormat(4, 1, 32, fmt=E2M1, scaling=MX),
    "nvfp4": StorageFormat(4, 1, 16, 4, E2M1, NVFP4),
}
# The format `fp8` has the scale 1.0, as in servers whose checkpoint has no scale.
KV_FORMATS: Mapping[str, StorageFormat] = {
    **CARRIER_FORMATS,
    "fp8": StorageFormat(8, fmt=E4M3),
    "fp8-tensor": StorageFormat(8, 4, "all", fmt=E4M3, scaling=TENSOR),
    "fp8-head": StorageFormat(8, 4, "head", fmt=E4M3, scaling=TENSOR),
    "fp8-token": _FP8_ROW_STORAGE,
    **_BLOCK_FORMATS,
}
WEIGHT_FORMATS: Mapping[str, StorageFormat] = {
    **CARRIER_FORMATS,
    "int8": StorageFormat(8, 2, "row"),
    "int4": StorageFormat(4, 4, 128),
    "fp8": _FP8_ROW_STORAGE,
    **_BLOCK_FORMATS,
}
# torch's CPU kernels that multiply by int8 or int4 weights. They require bf16 activations.
INT_WEIGHT_CPU_KERNELS = {"int8": "_weight_int8pack_mm", "int4": "_weight_int4pack_mm_for_cpu"}
INT4_GROUPS = (128, 64, 32)


def make_int4_storage_format(columns: int) -> StorageFormat:
    return StorageFormat(4, 4, next(size for size in INT4_GROUPS if columns % size == 0))


@dataclass(frozen=True)
class ServedArm:
    """The formats of a served model. `weights` is the format of the weights. If it is `own`, the case's precision
    casts weights and activations. With `low_inputs`, activations are also rounded to the format of the weights.
    """

    carrier: str = "bf16"
    kv: str = ""
    weights: str = ""
    low_inputs: bool = False

    @property
    def kv_format(self) -> str:
        return self.kv or self.carrier

    @property
    def weight_format(self) -> str:
        return self.weights or self.carrier


def choose_served_arm(params: Scalars, precision: Precision) -> ServedArm:
    """Returns the arm of a case. Its formats come from the case's precision or from the axes `kv` and `weights`.
    Raises UsageError if both specify formats.
    """
    kv = str(params["kv"])
    weights = str(params["weights"])
    options = precision.chosen
    if precision.name == SERVED_PRECISION:
        if (kv, weights) != (OWN, OWN):
            raise UsageError(
                f"{precision.mode} already chooses formats, and kv={kv}, weights={weights} choose them again."
            )
        low_inputs = options["activations"] == "low"
        return ServedArm(str(options["carrier"]), str(options["kv"]), str(options["weights"]), low_inputs)
    carrier = precision.carried_by or precision.name
    precision_weight_format = OWN if precision.carried_by else carrier
    return ServedArm(carrier, "" if kv == OWN else kv, precision_weight_format if weights == OWN else weights)


def check_served_support(params: Scalars, precision: Precision, facts: DeviceFacts) -> Support:
    """Returns how a device supports a served case. The case is native only if its operations can read the stored
    weights, keys and values without decoding them first.
    """
    try:
        arm = choose_served_arm(params, precision)
        shape = find_served_shape(str(params["size"]))
        check_weight_groups(shape, arm)
    except UsageError as error:
        return hardware.refused(str(error))
    if precision.carried_by and str(params["size"]) in USER_MODEL_SHAPES:
        return hardware.refused(
            f"a user's model can be served in {' or '.join(CARRIER_BYTES)}, or in a mode of `served`"
        )
    return _check_arm_support(arm, shape, precision, facts)


def check_stored_weight_support(precision: Precision, outputs: int, inputs: int, facts: DeviceFacts) -> Support:
    arm = replace(choose_served_arm({"kv": OWN, "weights": OWN}, precision), kv="")
    # Only the weight's own sizes matter for its support, so the model consists of this weight.
    shape = ServedShape(0, 0, 1, 1, 1, 1, (("blocks.0.weight", (outputs, inputs)),))
    try:
        check_weight_groups(shape, arm)
    except UsageError as error:
        return hardware.refused(str(error))
    return _check_arm_support(arm, shape, precision, facts)


def _check_arm_support(arm: ServedArm, shape: ServedShape, precision: Precision, facts: DeviceFacts) -> Support:
    weight_format_name = arm.weight_format
    # 1. Refuse combinations that do not exist.
    if arm.carrier not in CARRIER_BYTES:
        return hardware.refused(f"a served model computes in {' or '.join(CARRIER_BYTES)}, not in {arm.carrier}")
    if precision.whole_layers or (precision.name != SERVED_PRECISION and precision.float32_products != "highest"):
        return hardware.refused(f"{precision.mode} has no weights that could be stored: choose another dtype")
    if weight_format_name not in (OWN, arm.carrier) and precision.carried_by:
        return hardware.refused(f"{precision.mode} has its own weight format, so weights={arm.weights} is a conflict")
    # 2. Attention reads only the carrier. So keys and values in a different format must be decoded first.
    if arm.kv_format != arm.carrier:
        return hardware.emulated(f"keys and values in {arm.kv} are decoded before torch's attention")
    # 3. Weights in the carrier dtype need no special kernel.
    if weight_format_name in (OWN, arm.carrier):
        return hardware.native("torch's products") if precision.name == SERVED_PRECISION else precision.support(facts)
    # 4. Only on CPUs torch has kernels for encoded weights. The int4 kernel requires a multiple of 16 outputs.
    is_native = (
        not facts.accelerated
        and arm.carrier == "bf16"
        and not arm.low_inputs
        and weight_format_name in INT_WEIGHT_CPU_KERNELS
    )
    if is_native and not (
        weight_format_name == "int4" and any(outputs % 16 for _, outputs, _ in shape.format_matrices)
    ):
        return hardware.native(f"torch's {INT_WEIGHT_CPU_KERNELS[weight_format_name]}")
    return hardware.emulated(f"weights in {weight_format_name} are decoded before each product")


ROUTER_PATH = "mlp.router"
EXPERTS_PATH = ".experts."
# For each weight: its shape, and the standard deviation of its random values. A deviation of 0 means that all values
# are 1, as for norms.
WeightShapes = dict[str, tuple[tuple[int, ...], float]]


def list_weight_shapes(config: GPTConfig) -> WeightShapes:
    """Returns the shapes of all weights of a model, in the order of its parameters."""
    width = config.width
    vocabulary = config.vocabulary
    heads = (config.heads + 2 * config.key_heads) * config.head_width
    up = config.hidden * (2 if config.is_llama_like else 1)
    # Weights at the end of a branch start smaller, as in training.
    gain = (2 * config.layers) ** -0.5
    input_weight_deviation = width**-0.5
    output_deviation = gain * config.hidden**-0.5

    shapes: WeightShapes = {"embedding": ((vocabulary, width), 0.02)}
    if not config.is_llama_like:
        shapes["positions"] = ((config.sequence, width), 0.01)
    # Each block has norms, attention, a router if it has experts, and feed-forward parts.
    for number in range(config.layers):
        block = f"blocks.{number}"
        shapes[f"{block}.norm_attn.weight"] = shapes[f"{block}.norm_mlp.weight"] = ((width,), 0.0)
        shapes[f"{block}.attn.qkv.weight"] = ((heads, width), input_weight_deviation)
        shapes[f"{block}.attn.out.weight"] = ((width, width), gain * input_weight_deviation)
        # the router's scores are of order one: with smaller scores all experts would have nearly equal weights
        if config.experts:
            shapes[f"{block}.{ROUTER_PATH}"] = ((config.experts, width), input_weight_deviation)
        for part in list_feed_forward_paths(config.experts):
            is_up_projection = part.endswith("up")
            shapes[f"{block}.{part}.weight"] = (
                ((up, width), input_weight_deviation)
                if is_up_projection
                else ((width, config.hidden), output_deviation)
            )
    shapes["norm.weight"] = ((width,), 0.0)
    # A tied head is the embedding, which is already listed.
    if not config.tied:
        shapes["head.weight"] = ((vocabulary, width), input_weight_deviation)
    return shapes


@dataclass(frozen=True)
class ServedShape:
    """The sizes of a served model. An arm's format applies to the matrices of `blocks.N.`, except those of routers.

    A step reads one row of `embedding` and of `positions` for each token. It reads the weights of the chosen experts
    only, and all other weights completely. The `head` multiplies one token of each sequence, also if it is tied.
    """

    vocabulary: int
    sequence: int
    layers: int
    heads: int
    key_heads: int
    head_width: int
    shapes: tuple[tuple[str, tuple[int, ...]], ...]
    experts: int = 0
    top_k: int = 0

    def count_chosen_experts(self, tokens: int) -> float:
        """Returns how many experts of a layer get a token on average, if each of `tokens` tokens chooses `top_k`
        experts at random.
        """
        return self.experts * (1 - (1 - self.top_k / self.experts) ** tokens) if self.experts else 0.0

    @property
    def active_weight_count(self) -> float:
        """Returns how many of the blocks' weights one token uses, with only `top_k` experts."""
        expert_weights = sum(prod(shape) for name, shape in self.shapes if EXPERTS_PATH in name)
        return self.weights("blocks") - (expert_weights * (1 - self.top_k / self.experts) if self.experts else 0)

    def weights(self, *parts: str) -> int:
        # Vectors, such as the weights of norms, do not count.
        return sum(prod(shape) for name, shape in self.shapes if name.split(".")[0] in parts and len(shape) > 1)

    @property
    def format_matrices(self) -> Iterator[tuple[int, int, int]]:
        """Yields the number of the block, the outputs and the inputs of each matrix to which an arm's weight format
        applies.
        """
        for name, shape in self.shapes:
            if name.startswith("blocks.") and len(shape) == 2 and not name.endswith(ROUTER_PATH):
                yield int(name.split(".")[1]), shape[0], shape[1]


def check_weight_groups(shape: ServedShape, arm: ServedArm) -> None:
    """Raises UsageError in two cases: the rows of a weight cannot be divided into groups of int4, or the arm's weight
    format applies to no weight.
    """
    if arm.weight_format not in (OWN, *CARRIER_BYTES) and not any(shape.format_matrices):
        raise UsageError(
            f"weights={arm.weights} has no effect: no linear layer of the model is in a numbered block. Remove it."
        )
    for layer, _, inputs in shape.format_matrices:
        if arm.weights == "int4" and inputs % INT4_GROUPS[-1]:
            raise UsageError(
                f"weights=int4 needs rows that are multiples of {INT4_GROUPS[-1]}, but a weight of layer "
                f"{layer} has rows of {inputs} numbers. Choose int8."
            )


# The shapes of users' models, by the names of the functions that make them. Workers report these shapes to this
# process.
USER_MODEL_SHAPES: dict[str, ServedShape] = {}


def find_served_shape(size: str) -> ServedShape:
    if size in USER_MODEL_SHAPES:
        return USER_MODEL_SHAPES[size]
    if size not in SERVED_SIZES:
        raise UsageError(f"{size!r:.80} is not a served model of fp8bench. Use `fp8bench infer {size:.80}`.")
    return make_served_shape(SERVED_SIZES[size])


def make_served_shape(config: GPTConfig) -> ServedShape:
    # List a tied head too, because each step multiplies by it.
    shapes = tuple((name, shape) for name, (shape, _) in list_weight_shapes(replace(config, tied=False)).items())
    heads = (config.heads, config.key_heads, config.head_width)
    top_k = config.top_k if config.experts else 0
    return ServedShape(config.vocabulary, config.sequence, config.layers, *heads, shapes, config.experts, top_k)


@dataclass(frozen=True)
class StepBytes:
    """The fewest bytes that a decode step can read: those of weights, and those of keys and values. In the embedding,
    only the rows of the step's tokens count.
    """

    weights: int
    kv: int

    @property
    def total(self) -> int:
        return self.weights + self.kv


def step_bytes(model: ServedShape, arm: ServedArm, batch: int, context: int, experts: float | None = None) -> StepBytes:
    """Counts the fewest bytes that a decode step can read. The arm's weights must have one of WEIGHT_FORMATS, not
    `own`.

    `experts` is the average number of experts of a layer that are read. By default it is the expected number.
    """
    # 1. Count the weights that are read: rows of embedding and positions, block matrices in the arm's format, and
    # others in the carrier dtype.
    carrier_bytes = CARRIER_BYTES[arm.carrier]
    weight_bytes = 0.0
    read_expert_share = 1.0
    if model.experts:
        read_expert_share = (model.count_chosen_experts(batch) if experts is None else experts) / model.experts
    for name, shape in model.shapes:
        first_weight_path_part = name.partition(".")[0]
        if first_weight_path_part == "embedding":
            weight_bytes += batch * shape[-1] * carrier_bytes
        elif first_weight_path_part == "positions":
            # All sequences of a batch are at the same position, so they read the same row.
            weight_bytes += shape[-1] * carrier_bytes
        elif first_weight_path_part == "blocks" and len(shape) == 2 and not name.endswith(ROUTER_PATH):
            has_int4_weights = arm.weight_format == "int4"
            weight_number_format = (
                make_int4_storage_format(shape[1]) if has_int4_weights else WEIGHT_FORMATS[arm.weight_format]
            )
            weight_bytes += weight_number_format.count_bytes(*shape) * (
                read_expert_share if EXPERTS_PATH in name else 1
            )
        else:
            weight_bytes += prod(shape) * carrier_bytes

    # 2. Count keys and values of the whole context.
    rows = batch * model.key_heads * context
    heads = KV_FORMATS[arm.kv_format].count_bytes(rows, model.head_width, model.key_heads)
    return StepBytes(round(weight_bytes), 2 * model.layers * heads)


def estimate_min_memory(model: ServedShape, batch: int, context: int) -> float:
    """Returns a lower bound of the memory in bytes: half a byte for each element of the blocks' weights and of the
    cache, and two bytes for each element of the embedding.
    """
    cache_element_count = 2.0 * model.layers * batch * context * model.key_heads * model.head_width
    return 2.0 * model.weights("embedding") + 0.5 * (model.weights("blocks") + cache_element_count)


def count_forward_flops(model: ServedShape, batch: int, new: int, context: int) -> float:
    """Counts the FLOPs of a forward pass: two for each weight and token, and attention's two products. The head
    counts for one token of each sequence.
    """
    weight_flops = 2.0 * batch * (new * model.active_weight_count + model.weights("head"))
    # Each new token attends to all earlier positions, to earlier new tokens and to itself.
    attended_position_pairs = new * (context - new) + new * (new + 1) / 2
    return weight_flops + 4.0 * batch * model.layers * model.heads * model.head_width * attended_position_pairs
