"""Sizes of models, the layers of named models, and the list of tensors that are captured from a training. This module
must not import torch, because planning imports it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from fp8bench.protocols import Layer, Role

# The default number of experts that each token uses.
EXPERTS_PER_TOKEN = 2


class MoeSizes(NamedTuple):
    """The sizes of a layer of gated experts. Each token uses `top_k` experts."""

    width: int
    hidden: int
    experts: int
    top_k: int


LATENT_CHANNELS = 4
# A DiT divides a latent into squares with this side.
PATCH_SIDE = 2
# The number of sines and cosines that encode a time step.
TIME_EMBEDDING_FREQUENCIES = 256
# The width of an attention head, if the model's width is a multiple of it.
HEAD_WIDTH = 64
TIME_STEPS = 1000


class DenoiserSizes(NamedTuple):
    """The sizes of a denoiser for latents of image x image. `layers` is the number of a DiT's blocks. A UNet has this
    number of blocks at full resolution before the half resolution, and the same number after it.
    """

    denoiser: str
    batch: int
    image: int
    width: int
    layers: int

    @property
    def blocks(self) -> GPTConfig:
        heads = count_heads(self.width)
        tokens = (self.image // PATCH_SIDE) ** 2
        return GPTConfig(0, self.width, self.layers, heads, heads, 4 * self.width, self.batch, tokens)


def count_heads(width: int) -> int:
    return 1 if width % HEAD_WIDTH else width // HEAD_WIDTH


class SamplerPlan(NamedTuple):
    """How a sampler runs: its number of steps, its guidance, and how many of the first and of the last steps run in
    high precision.
    """

    steps: int
    guidance: str
    first: int
    last: int

    @property
    def denoiser_calls(self) -> int:
        return self.steps * (2 if self.guidance == "twice" else 1)

    def time(self, step: int) -> int:
        """Returns the time of the noise schedule at which a sampling step starts. Times are evenly spaced, from the
        noisiest (999) down. After the last step the time is -1, which stands for the image without noise.
        """
        return round(TIME_STEPS * (self.steps - step) / self.steps) - 1

    def runs_in_high_precision(self, step: int) -> bool:
        return step < self.first or step >= self.steps - self.last


@dataclass(frozen=True)
class GPTConfig:
    """The sizes of a model, with the batch and sequence of its default step.

    `is_llama_like` means Llama's form: RMS norm, rotary positions and gates. `experts` is the number of experts in each
    feed-forward part, or 0. Each token uses `top_k` of them. The head of a `tied` model multiplies by the embedding's
    weights.
    """

    vocabulary: int
    width: int
    layers: int
    heads: int
    key_heads: int
    hidden: int
    batch: int
    sequence: int
    is_llama_like: bool = False
    experts: int = 0
    top_k: int = EXPERTS_PER_TOKEN
    tied: bool = False

    @property
    def head_width(self) -> int:
        return self.width // self.heads

    @property
    def has_grouped_heads(self) -> bool:
        return self.key_heads != self.heads

    @property
    def block_weights(self) -> int:
        return self._attention_weights + max(1, self.experts) * self._expert_weights + self.experts * self.width

    @property
    def _attention_weights(self) -> int:
        return self.width * (2 * self.width + 2 * self.key_heads * self.head_width)

    @property
    def _expert_weights(self) -> int:
        return (3 if self.is_llama_like else 2) * self.width * self.hidden

    @property
    def weights(self) -> int:
        """The number of trained weights, without norms and positions."""
        return self.layers * self.block_weights + (1 if self.tied else 2) * self.vocabulary * self.width

    def step_flops(self, sequences: int, length: int) -> float:
        """Counts the FLOPs of forward and backward: 6 for each token and each weight that it uses, and the products
        of causal attention.
        """
        tokens = sequences * length
        block = self._attention_weights + (self.top_k if self.experts else 1) * self._expert_weights
        linear = 6.0 * tokens * (self.layers * block + self.vocabulary * self.width)
        # In each block, the scores of a sequence of T tokens and their product with the values take 4 T^2 * width FLOPs
        # in forward and twice that in backward. The causal mask leaves half of it.
        attention = 12.0 * sequences * self.layers * length * length * self.width / 2
        return linear + attention


def list_feed_forward_paths(experts: int) -> tuple[str, ...]:
    parts: list[str] = []
    for owner_path in [f"mlp.experts.{number}" for number in range(experts)] or ["mlp"]:
        parts += (f"{owner_path}.up", f"{owner_path}.down")
    return tuple(parts)


def gpt_layers(blocks: int, experts: int = 0) -> tuple[Layer, ...]:
    layers = []
    for block in range(blocks):
        layers += [Layer(f"blocks.{block}.{part}", "attn") for part in ("attn.qkv", "attn.out")]
        layers += [Layer(f"blocks.{block}.{part}", "mlp") for part in list_feed_forward_paths(experts)]
    return (*layers, Layer("head", "head", high=True))


IMAGE_CLASS_COUNT = 1000


@dataclass(frozen=True)
class VisionSizes:
    """The sizes of a model of square images. The model is `resnet`, `vit`, or `two-input`, which also reads `text`
    tokens with each image.
    """

    model: str
    image: int
    width: int
    layers: int
    patch: int = 1
    text: int = 0

    @property
    def inner_width(self) -> int:
        return self.width // 4

    @property
    def stage_side(self) -> int:
        return ((self.image - 1) // 2) // 2 + 1

    @property
    def patches(self) -> int:
        return (self.image // self.patch) ** 2

    @property
    def vocabulary(self) -> int:
        return 16 * self.width

    @property
    def blocks(self) -> GPTConfig:
        heads = self.width // (64 if self.width >= 256 and self.width % 64 == 0 else 16)
        tokens = self.patches + self.text
        return GPTConfig(self.vocabulary, self.width, self.layers, heads, heads, 4 * self.width, 1, tokens)

    def products(self) -> tuple[tuple[str, int, int], ...]:
        """Returns (name, rows, weights) of each kind of layer: how many rows it multiplies for one image, and how many
        weights multiply each row.
        """
        width = self.width
        inner_width = self.inner_width
        block_weights = self.layers * self.blocks.block_weights
        if self.model == "resnet":  # each bottleneck has three convolutions, and the first one also a shortcut
            stage_weights = self.layers * (2 * width * inner_width + 9 * inner_width**2) + inner_width**2
            stem_rows_and_weights = ((self.image - 1) // 2 + 1) ** 2, 49 * 3 * inner_width
            return (
                ("stem", *stem_rows_and_weights),
                ("block", self.stage_side**2, stage_weights),
                ("head", 1, width * IMAGE_CLASS_COUNT),
            )
        stem_rows_and_weights = self.patches, 3 * self.patch**2 * width
        if self.model == "vit":
            return (
                ("stem", *stem_rows_and_weights),
                ("block", self.patches, block_weights),
                ("head", 1, width * IMAGE_CLASS_COUNT),
            )
        text_kinds = ("block", self.patches + self.text, block_weights), ("head", self.text, width * self.vocabulary)
        return ("stem", *stem_rows_and_weights), ("block", self.patches, block_weights + width**2), *text_kinds

    def attention_flops(self) -> float:
        """Counts the FLOPs of attention in the forward pass of one image: 4 T^2 w for each block with T tokens and
        width w, or half of that if the block reads text.
        """
        text_flops = 2.0 * (self.patches + self.text) ** 2 if self.model == "two-input" else 0.0
        return 0.0 if self.model == "resnet" else self.layers * self.width * (4.0 * self.patches**2 + text_flops)

    def around(self) -> tuple[Layer, ...]:
        """Returns the layers without a matrix product, such as norms. A vision transformer's positions count as its
        embedding. A ResNet has no embedding.
        """
        if self.model == "resnet":
            return make_surrounding_layers(("norm", *self._list_convolutions("norms.")), "residual", "logits")
        norms = [layer.name for layer in make_gpt_surrounding_layers(self.layers) if layer.kind == "norm"]
        image_norm_names = [f"image.{name}" for name in norms] if self.model == "two-input" else []
        return make_surrounding_layers((*image_norm_names, *norms), *_LAYER_KIND_BY_PART)

    def low_layers(self) -> tuple[str, ...]:
        if self.model == "resnet":
            return self._list_convolutions()
        blocks = tuple(layer.name for layer in gpt_layers(self.layers) if not layer.high)
        return blocks if self.model == "vit" else (*(f"image.{name}" for name in blocks), "project", *blocks)

    def _list_convolutions(self, before_name: str = "") -> tuple[str, ...]:
        """Returns the paths of a ResNet's convolutions, with `before_name` before the last part. The first block has
        one more convolution than the others, the shortcut.
        """
        paths = [f"blocks.0.{before_name}shortcut"]
        for block in range(self.layers):
            paths += [f"blocks.{block}.{before_name}{part}" for part in ("reduce", "spatial", "expand")]
        return tuple(paths)


_LAYER_KIND_BY_PART = {"embedding": "embed", "residual": "residual", "logits": "logits"}


def make_surrounding_layers(norms: Iterable[str], *parts: str) -> tuple[Layer, ...]:
    name_kind_pairs = (*((part, _LAYER_KIND_BY_PART[part]) for part in parts), *((name, "norm") for name in norms))
    return tuple(Layer(name, layer_kind, product=False) for name, layer_kind in name_kind_pairs)


def around(norms: Iterable[str]) -> tuple[Layer, ...]:
    return make_surrounding_layers((*norms, "norm"), *_LAYER_KIND_BY_PART)


def make_gpt_surrounding_layers(blocks: int) -> tuple[Layer, ...]:
    norms: list[str] = []
    for block in range(blocks):
        norms += (f"blocks.{block}.norm_attn", f"blocks.{block}.norm_mlp")
    return around(norms)


# The number of tokens from which an MLP predicts the next token.
CONTEXT_TOKENS = 8
# The convolutions divide a text into lines with this number of tokens.
LINE_TOKENS = 16

# A size that is named after a published model has a tied head if that model has one.
SIZES = {
    "nano": GPTConfig(256, 192, 2, 4, 4, 768, batch=2, sequence=96),
    "micro": GPTConfig(256, 256, 4, 4, 4, 1024, batch=8, sequence=128),
    "gpt2-124m": GPTConfig(50304, 768, 12, 12, 12, 3072, batch=8, sequence=1024, tied=True),
    "gpt-350m": GPTConfig(50304, 1024, 24, 16, 16, 4096, batch=8, sequence=1024, tied=True),
    "llama-1b": GPTConfig(128256, 2048, 16, 32, 8, 8192, batch=2, sequence=2048, is_llama_like=True, tied=True),
}

# The sizes of the trained model that comes with fp8bench. It was trained on Python's source code. Its 128 token ids are
# ASCII codes.
NANO_PYTHON_SIZE = GPTConfig(128, 64, 4, 2, 1, 160, batch=8, sequence=256, is_llama_like=True)
# The sizes of served models. The sequence of a model is its longest context.
SERVED_SIZES = {
    "nano": GPTConfig(256, 192, 2, 4, 4, 768, batch=1, sequence=16384),
    "nano-llama": GPTConfig(256, 192, 2, 6, 2, 512, batch=1, sequence=16384, is_llama_like=True),
    "nano-moe": GPTConfig(256, 192, 2, 6, 2, 256, batch=1, sequence=16384, is_llama_like=True, experts=8),
    "nano-python": NANO_PYTHON_SIZE,
    "micro": GPTConfig(256, 256, 4, 4, 4, 1024, batch=1, sequence=16384),
    "gpt2": GPTConfig(50257, 768, 12, 12, 12, 3072, batch=1, sequence=1024, tied=True),
    "gpt-350m": GPTConfig(50304, 1024, 24, 16, 16, 4096, batch=1, sequence=1024, tied=True),
    "llama-1b": GPTConfig(128256, 2048, 16, 32, 8, 8192, batch=1, sequence=131072, is_llama_like=True, tied=True),
    "llama3-8b": GPTConfig(128256, 4096, 32, 32, 8, 14336, batch=1, sequence=131072, is_llama_like=True),
    "olmoe-1b-7b": GPTConfig(50304, 2048, 16, 16, 16, 1024, 1, 4096, is_llama_like=True, experts=64, top_k=8),
    "mixtral-8x7b": GPTConfig(32000, 4096, 32, 32, 8, 14336, batch=1, sequence=32768, is_llama_like=True, experts=8),
}


# Maps a layer's name to its output features and input features.
FeaturesByLayer = dict[str, tuple[int, int]]


def list_block_features(
    width: int, hidden: int, heads: int, key_heads: int = 0, head: int = 0, gated: bool = True
) -> FeaturesByLayer:
    """Returns the layers of a decoder's block. Attention has one product for queries, keys and values, and gate and
    up are one product too.

    By default each query head has its own key head, and heads divide the width.
    """
    head = head or width // heads
    up = {"gate_up": (2 * hidden, width)} if gated else {"up": (hidden, width)}
    return {
        "qkv": ((heads + 2 * (key_heads or heads)) * head, width),
        "out": (width, heads * head),
        **up,
        "down": (width, hidden),
    }


# These sizes are from the models' published configurations.
MODELS: dict[str, FeaturesByLayer] = {
    "gpt2": list_block_features(768, 3072, 12, gated=False),
    "gpt3-175b": list_block_features(12288, 49152, 96, gated=False),
    "llama3-8b": list_block_features(4096, 14336, 32, 8),
    "llama3-70b": list_block_features(8192, 28672, 64, 8),
    "llama3-405b": list_block_features(16384, 53248, 128, 8),
    "qwen2.5-7b": list_block_features(3584, 18944, 28, 4),
    "qwen3-8b": list_block_features(4096, 12288, 32, 8),
    "qwen3-32b": list_block_features(5120, 25600, 64, 8, head=128),
    "deepseek-v3": {
        "q_a_kv_a": (2112, 7168), "q_b": (24576, 1536), "kv_b": (32768, 512), "out": (7168, 16384),
        "expert_gate_up": (4096, 7168), "expert_down": (7168, 2048),
    },
}  # fmt: skip
# The (vocabulary, width) of each model's output layer, which comes after all blocks.
OUTPUT_LAYERS: dict[str, tuple[int, int]] = {
    "gpt2": (50257, 768),
    "gpt3-175b": (50257, 12288),
    "llama3-8b": (128256, 4096),
    "llama3-70b": (128256, 8192),
    "llama3-405b": (128256, 16384),
    "qwen2.5-7b": (152064, 3584),
    "qwen3-8b": (151936, 4096),
    "qwen3-32b": (151936, 5120),
    "deepseek-v3": (129280, 7168),
}
# The keys of a model's sizes. The first three are required.
_SIZE_KEYS = ("hidden", "ffn", "heads", "kv", "head", "tokens")
_MAX_MODEL_SIZE_VALUE = 1 << 18


class ModelProducts(NamedTuple):
    """The layers of a model's block, with their sizes. `tokens` is None if the model's name or sizes do not specify
    it.
    """

    features: FeaturesByLayer
    tokens: int | None = None


def parse_model_products(text: str) -> ModelProducts:
    """Parses a name of MODELS, or sizes such as hidden:4096/ffn:14336/heads:32/kv:8/tokens:16384. Raises ValueError."""
    if text in MODELS:
        return ModelProducts(MODELS[text])
    # 1. Read each size at most once.
    sizes: dict[str, int] = {}
    for word in text.split("/"):
        name, _, digits = word.partition(":")
        if name not in _SIZE_KEYS or name in sizes:
            raise ValueError(
                f"{word!r} is not a size: use each of {', '.join(f'{size}:N' for size in _SIZE_KEYS)} at most once"
            )
        if not (digits.isascii() and digits.isdigit() and 1 <= int(digits) <= _MAX_MODEL_SIZE_VALUE):
            raise ValueError(f"expected {name}: and a number from 1 to {_MAX_MODEL_SIZE_VALUE}, not {word!r}")
        sizes[name] = int(digits)
    # 2. Check that the sizes are complete and divide each other.
    if missing := [name for name in _SIZE_KEYS[:3] if name not in sizes]:
        raise ValueError(f"a model's sizes need {missing[0]}:N, as in hidden:4096/ffn:14336/heads:32/kv:8")
    hidden, ffn, heads = (sizes[name] for name in _SIZE_KEYS[:3])
    if "head" not in sizes and hidden % heads:
        raise ValueError(f"{heads} heads do not divide hidden:{hidden}; give the width of a head, as in head:128")
    if heads % sizes.get("kv", heads):
        raise ValueError(f"kv:{sizes['kv']} does not divide heads:{heads}")
    # 3. Compute the features. The size 0 stands for the default.
    features = list_block_features(hidden, ffn, heads, sizes.get("kv", 0), sizes.get("head", 0))
    return ModelProducts(features, sizes.get("tokens"))


OPERAND_ROLES: dict[str, tuple[Role, Role]] = {
    "forward": (Role.INPUT, Role.WEIGHT),
    "input-gradient": (Role.GRADIENT, Role.WEIGHT),
    "weight-gradient": (Role.GRADIENT, Role.INPUT),
}
# For each product: the roles of the operands that are transposed for it. A recipe may rotate such operands or keep
# them in high precision.
TRANSPOSED_ROLES: dict[str, tuple[Role, ...]] = {
    "forward": (),
    "input-gradient": (Role.WEIGHT,),
    "weight-gradient": (Role.GRADIENT, Role.INPUT),
}


def get_product_sides(product: str, tokens: int, outputs: int, inputs: int) -> tuple[int, int, int]:
    if product == "forward":
        return tokens, outputs, inputs
    if product == "input-gradient":
        return tokens, inputs, outputs
    return outputs, inputs, tokens


def models() -> tuple[str, ...]:
    return (*MODELS, *SIZES)


def list_model_features(model: str) -> FeaturesByLayer:
    if model in SIZES:
        return list_features(SIZES[model])
    return {**MODELS[model], "head": OUTPUT_LAYERS[model]}


def get_default_token_count(model: str) -> int:
    """Returns the number of tokens in a step, which are the rows of its activations. For a model of SIZES that is its
    batch times its sequence. For other models it is the default of the suite gemm on a GPU.
    """
    return SIZES[model].batch * SIZES[model].sequence if model in SIZES else 8192


def list_features(config: GPTConfig) -> FeaturesByLayer:
    layers = list_block_features(
        config.width, config.hidden, config.heads, config.key_heads, gated=config.is_llama_like
    )
    qkv, out, up, down = layers.values()
    return {"qkv": qkv, "out": out, "up": up, "down": down, "head": (config.vocabulary, config.width)}


# The small model whose tensors are captured. It is trained until its loss is well below that of guessing.
CAPTURED_MODEL_SIZE = "nano"
CAPTURED_MODEL_BATCH = 4
TRAINING_STEPS = 40
# The number of last steps whose tensors are captured. Delayed scales need several steps.
CAPTURED_STEP_COUNT = 8


@dataclass(frozen=True)
class CapturedTensor:
    """One operand of one layer, with its shape. The last dimension is the contraction."""

    kind: str
    layer: str
    role: Role
    rows: int
    columns: int


def _list_captured_tensors() -> dict[str, CapturedTensor]:
    config = SIZES[CAPTURED_MODEL_SIZE]
    tokens = CAPTURED_MODEL_BATCH * config.sequence
    block = f"blocks.{config.layers - 1}"
    # For each kind, capture a layer with a typical input: for attention the input after a norm, and for feed-forward
    # the input after the activation.
    layers = (
        ("attn", f"{block}.attn.qkv", config.width, 3 * config.width),
        ("mlp", f"{block}.mlp.down", config.hidden, config.width),
        ("head", "head", config.width, config.vocabulary),
    )
    captured_tensors = {}
    for layer_kind, name, inputs, outputs in layers:
        shape_by_role = {Role.INPUT: (tokens, inputs), Role.WEIGHT: (outputs, inputs), Role.GRADIENT: (tokens, outputs)}
        for role, (rows, columns) in shape_by_role.items():
            captured_tensors[f"{layer_kind}-{role}"] = CapturedTensor(layer_kind, name, role, rows, columns)
    return captured_tensors


# The names are 'attn-input', 'attn-weight' and so on.
CAPTURED = _list_captured_tensors()
