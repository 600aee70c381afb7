"""Formats of a served model's weights, keys and values: by name, by bytes, and as arms of a comparison.

No torch here: plans read it. An arm has a format for keys and values, one for the weights of its blocks, and the dtype
of all else.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from math import prod

from fp8bench.errors import UsageError
from fp8bench.formats import hardware
from fp8bench.formats.grids import E2M1, E4M3, Format
from fp8bench.formats.recipes import MX, NVFP4, ROW, TENSOR, Scaling
from fp8bench.model import DeviceFacts, Scalars, Support
from fp8bench.nn.sizes import SERVED_SIZES, GPTConfig, feed_parts
from fp8bench.protocols import Precision

SERVED = "served"
OWN = "own"
CARRIERS = {"fp32": 4, "bf16": 2}


@dataclass(frozen=True)
class KeptFormat:
    """A format of stored numbers: the bits of each, and the bytes of a scale. `shared` is the unit with one scale:
    'all' (a tensor), 'head', 'row', the length of a block along the row, or 0: none. `above` are the bytes of one more
    scale a tensor. `fmt` and `scaling` are None for torch's own dtypes and integers.
    """

    bits: int
    scale_bytes: int = 0
    shared: str | int = 0
    above: int = 0
    fmt: Format | None = None
    scaling: Scaling | None = None

    def bytes(self, rows: int, columns: int, heads: int = 1) -> int:
        blocks = -(-columns // self.shared) if isinstance(self.shared, int) and self.shared else 0
        scales = {"all": 1, "head": heads, "row": rows}.get(str(self.shared), rows * blocks)
        return rows * -(-columns * self.bits // 8) + scales * self.scale_bytes + self.above


PLAIN = {name: KeptFormat(8 * size) for name, size in CARRIERS.items()}
# For `fp8` servers take a scale of 1.0 where a checkpoint has none.
KV_FORMATS: Mapping[str, KeptFormat] = {
    **PLAIN,
    "fp8": KeptFormat(8, fmt=E4M3),
    "fp8-tensor": KeptFormat(8, 4, "all", fmt=E4M3, scaling=TENSOR),
    "fp8-head": KeptFormat(8, 4, "head", fmt=E4M3, scaling=TENSOR),
    "fp8-token": KeptFormat(8, 4, "row", fmt=E4M3, scaling=ROW),
    "mxfp4": KeptFormat(4, 1, 32, fmt=E2M1, scaling=MX),
    "nvfp4": KeptFormat(4, 1, 16, 4, E2M1, NVFP4),
}
WEIGHT_FORMATS: Mapping[str, KeptFormat] = {
    **PLAIN,
    "int8": KeptFormat(8, 2, "row"),
    "int4": KeptFormat(4, 4, 128),
    "fp8": KeptFormat(8, 4, "row", fmt=E4M3, scaling=ROW),
    "mxfp4": KeptFormat(4, 1, 32, fmt=E2M1, scaling=MX),
    "nvfp4": KeptFormat(4, 1, 16, 4, E2M1, NVFP4),
}
# torch's products for these on a CPU; both take bf16 activations.
CPU_KERNELS = {"int8": "_weight_int8pack_mm", "int4": "_weight_int4pack_mm_for_cpu"}
INT4_GROUPS = (128, 64, 32)


def int4_format(columns: int) -> KeptFormat:
    return KeptFormat(4, 4, next(size for size in INT4_GROUPS if columns % size == 0))


@dataclass(frozen=True)
class ServedArm:
    """`weights` is a format, or `own`: that of the case's precision, with its activations. `low_inputs` rounds
    activations to the weights' format too."""

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


def arm_of(params: Scalars, precision: Precision) -> ServedArm:
    """The arm of a case, from its precision and its axes. Raises UsageError where both choose formats."""
    kv = str(params["kv"])
    weights = str(params["weights"])
    chosen = precision.chosen
    if precision.name == SERVED:
        if (kv, weights) != (OWN, OWN):
            raise UsageError(f"{precision.mode} says what is kept, and kv={kv}, weights={weights} say it again.")
        low = chosen["activations"] == "low"
        return ServedArm(str(chosen["carrier"]), str(chosen["kv"]), str(chosen["weights"]), low)
    carrier = precision.carried_by or precision.name
    own_weights = OWN if precision.carried_by else carrier
    return ServedArm(carrier, "" if kv == OWN else kv, own_weights if weights == OWN else weights)


def served_support(params: Scalars, precision: Precision, facts: DeviceFacts) -> Support:
    """Native only where nothing has to be restored before a product."""
    try:
        arm = arm_of(params, precision)
        shape = served_shape(str(params["size"]))
        check_groups(shape, arm)
    except UsageError as error:
        return hardware.refused(str(error))
    if precision.carried_by and str(params["size"]) in OWN_SHAPES:
        return hardware.refused(f"a model of your own is served in {' or '.join(CARRIERS)}, or by a mode of `served`")
    return _arm_support(arm, shape, precision, facts)


def kept_support(precision: Precision, outputs: int, inputs: int, facts: DeviceFacts) -> Support:
    arm = replace(arm_of({"kv": OWN, "weights": OWN}, precision), kv="")
    shape = ServedShape(0, 0, 1, 1, 1, 1, (("blocks.0.weight", (outputs, inputs)),))
    try:
        check_groups(shape, arm)
    except UsageError as error:
        return hardware.refused(str(error))
    return _arm_support(arm, shape, precision, facts)


def _arm_support(arm: ServedArm, shape: ServedShape, precision: Precision, facts: DeviceFacts) -> Support:
    weights = arm.weight_format
    # 1. Refuse combinations that no served model has.
    if arm.carrier not in CARRIERS:
        return hardware.refused(f"a served model's values travel in {' or '.join(CARRIERS)}, not in {arm.carrier}")
    if precision.whole_layers or (precision.name != SERVED and precision.float32_products != "highest"):
        return hardware.refused(f"{precision.mode} has no weights that could be kept: choose another dtype")
    if weights not in (OWN, arm.carrier) and precision.carried_by:
        return hardware.refused(f"{precision.mode} keeps weights its own way: weights={arm.weights} is another")
    # 2. Keys and values in a format are decoded ahead of attention, which reads the carrier only.
    if arm.kv_format != arm.carrier:
        return hardware.emulated(f"keys and values in {arm.kv} are restored before torch's attention")
    # 3. Weights in the carrier need no special kernel.
    if weights in (OWN, arm.carrier):
        return hardware.native("torch's own products") if precision.name == SERVED else precision.support(facts)
    # 4. torch has kernels for coded weights on CPUs only, and for whole groups of outputs.
    native = not facts.accelerated and arm.carrier == "bf16" and not arm.low_inputs and weights in CPU_KERNELS
    if native and not (weights == "int4" and any(outputs % 16 for _, outputs, _ in shape.format_matrices)):
        return hardware.native(f"torch's {CPU_KERNELS[weights]}")
    return hardware.emulated(f"weights in {weights} are restored before they are multiplied")


ROUTER = "mlp.router"
EXPERTS = ".experts."
# Name -> shape and standard deviation of random values; 0 stands for ones, as norms begin.
Shapes = dict[str, tuple[tuple[int, ...], float]]


def served_shapes(config: GPTConfig) -> Shapes:
    """All weights of a model in the order of its parameters."""
    width = config.width
    vocabulary = config.vocabulary
    heads = (config.heads + 2 * config.key_heads) * config.head_width
    up = config.hidden * (2 if config.modern else 1)
    # Weights that end a branch begin smaller, as in training.
    gain = (2 * config.layers) ** -0.5
    into = width**-0.5
    out_of = gain * config.hidden**-0.5

    shapes: Shapes = {"embedding": ((vocabulary, width), 0.02)}
    if not config.modern:
        shapes["positions"] = ((config.sequence, width), 0.01)
    # Blocks follow in order, each with its norms, attention, router and feed-forward parts.
    for number in range(config.layers):
        block = f"blocks.{number}"
        shapes[f"{block}.norm_attn.weight"] = shapes[f"{block}.norm_mlp.weight"] = ((width,), 0.0)
        shapes[f"{block}.attn.qkv.weight"] = ((heads, width), into)
        shapes[f"{block}.attn.out.weight"] = ((width, width), gain * into)
        if config.experts:  # scores of order one: smaller ones would weigh all experts alike
            shapes[f"{block}.{ROUTER}"] = ((config.experts, width), into)
        for part in feed_parts(config.experts):
            is_up = part.endswith("up")
            shapes[f"{block}.{part}.weight"] = ((up, width), into) if is_up else ((width, config.hidden), out_of)
    shapes["norm.weight"] = ((width,), 0.0)
    # A tied head is the embedding, which is there already.
    if not config.tied:
        shapes["head.weight"] = ((vocabulary, width), into)
    return shapes


@dataclass(frozen=True)
class ServedShape:
    """The sizes of a served model. An arm's format applies to matrices of `blocks.N.`, except a router's. A step reads
    one row a token of `embedding`, one of `positions`, the chosen ones of `experts`, the `head` for one token a
    sequence (also a tied one), and all else whole."""

    vocabulary: int
    sequence: int
    layers: int
    heads: int
    key_heads: int
    head_width: int
    shapes: tuple[tuple[str, tuple[int, ...]], ...]
    experts: int = 0
    top_k: int = 0

    def chosen(self, tokens: int) -> float:
        """Returns the expected number of a layer's experts with any of these tokens, if each takes `top_k` at
        random."""
        return self.experts * (1 - (1 - self.top_k / self.experts) ** tokens) if self.experts else 0.0

    @property
    def active(self) -> float:
        """The number of blocks' weights that one token goes through."""
        of_experts = sum(prod(shape) for name, shape in self.shapes if EXPERTS in name)
        return self.weights("blocks") - (of_experts * (1 - self.top_k / self.experts) if self.experts else 0)

    def weights(self, *parts: str) -> int:
        return sum(prod(shape) for name, shape in self.shapes if name.split(".")[0] in parts and len(shape) > 1)

    @property
    def format_matrices(self) -> Iterator[tuple[int, int, int]]:
        """Layer, outputs and inputs of each matrix that an arm may keep in a format."""
        for name, shape in self.shapes:
            if name.startswith("blocks.") and len(shape) == 2 and not name.endswith(ROUTER):
                yield int(name.split(".")[1]), shape[0], shape[1]


def check_groups(shape: ServedShape, arm: ServedArm) -> None:
    """Raises UsageError where rows of a weight cannot be divided into groups of int4, or no weight has a format."""
    if arm.weight_format not in (OWN, *CARRIERS) and not any(shape.format_matrices):
        raise UsageError(
            f"weights={arm.weights} changes nothing: no linear layer of the model is in a numbered block. Leave it out."
        )
    for layer, _, inputs in shape.format_matrices:
        if arm.weights == "int4" and inputs % INT4_GROUPS[-1]:
            raise UsageError(
                f"weights=int4 shares scales in groups of {INT4_GROUPS[-1]} or more, and rows of a weight of layer "
                f"{layer} have {inputs} numbers. Choose int8."
            )


# Shapes of users' own models by their makers' names, as workers reported them to this process.
OWN_SHAPES: dict[str, ServedShape] = {}


def served_shape(size: str) -> ServedShape:
    if size in OWN_SHAPES:
        return OWN_SHAPES[size]
    if size not in SERVED_SIZES:
        raise UsageError(f"{size!r:.80} is no model that is served here. Ask `fp8bench infer {size:.80}` for it.")
    return shape_of(SERVED_SIZES[size])


def shape_of(config: GPTConfig) -> ServedShape:
    shapes = tuple((name, shape) for name, (shape, _) in served_shapes(replace(config, tied=False)).items())
    heads = (config.heads, config.key_heads, config.head_width)
    chosen = config.top_k if config.experts else 0
    return ServedShape(config.vocabulary, config.sequence, config.layers, *heads, shapes, config.experts, chosen)


@dataclass(frozen=True)
class StepBytes:
    """The least that a decode step reads: weights, with only its tokens' rows of the embedding, and keys and values."""

    weights: int
    kv: int

    @property
    def total(self) -> int:
        return self.weights + self.kv


def step_bytes(model: ServedShape, arm: ServedArm, batch: int, context: int, experts: float | None = None) -> StepBytes:
    """Counts the bytes for weights in this module's formats, not in `own` ones. `experts` is the mean number read in a
    layer, by default the expected one."""
    # 1. Weights: an embedding's rows of the batch, matrices of blocks in the arm's format, all else in the carrier.
    carrier_bytes = CARRIERS[arm.carrier]
    weights = 0.0
    read_share = 1.0
    if model.experts:
        read_share = (model.chosen(batch) if experts is None else experts) / model.experts
    for name, shape in model.shapes:
        part = name.partition(".")[0]
        if part == "embedding":
            weights += batch * shape[-1] * carrier_bytes
        elif part == "positions":
            weights += shape[-1] * carrier_bytes
        elif part == "blocks" and len(shape) == 2 and not name.endswith(ROUTER):
            is_int4 = arm.weight_format == "int4"
            number_format = int4_format(shape[1]) if is_int4 else WEIGHT_FORMATS[arm.weight_format]
            weights += number_format.bytes(*shape) * (read_share if EXPERTS in name else 1)
        else:
            weights += prod(shape) * carrier_bytes

    # 2. Keys and values of the whole context.
    rows = batch * model.key_heads * context
    heads = KV_FORMATS[arm.kv_format].bytes(rows, model.head_width, model.key_heads)
    return StepBytes(round(weights), 2 * model.layers * heads)


def served_memory(model: ServedShape, batch: int, context: int) -> float:
    """A lower bound of a state's memory: weights and cache at half a byte a number, the embedding at two bytes."""
    cache = 2.0 * model.layers * batch * context * model.key_heads * model.head_width
    return 2.0 * model.weights("embedding") + 0.5 * (model.weights("blocks") + cache)


def forward_flops(model: ServedShape, batch: int, new: int, context: int) -> float:
    """Two FLOPs a weight and token (for the head, one token a sequence), and attention's two products."""
    linear = 2.0 * batch * (new * model.active + model.weights("head"))
    pairs = new * (context - new) + new * (new + 1) / 2
    return linear + attention_flops(model, batch, pairs)


def attention_flops(model: ServedShape, batch: int, pairs: float) -> float:
    return 4.0 * batch * model.layers * model.heads * model.head_width * pairs
