"""Sizes of models that workloads train, linear layers of named models, and the tensors captured from a training.

No torch here: plans read it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from fp8bench.protocols import Layer, Role

# Of all experts, those that a token goes through.
CHOSEN = 2


class MoeSizes(NamedTuple):
    """Those of a layer of gated experts, of which each token takes `top_k`."""

    width: int
    hidden: int
    experts: int
    top_k: int


@dataclass(frozen=True)
class GPTConfig:
    """A model and the step it runs by default. `modern` is Llama's manner: RMS norm, rotary positions, gates.

    With `experts` each feed-forward block is so many, of which each token goes through CHOSEN.
    """

    vocabulary: int
    width: int
    layers: int
    heads: int
    key_heads: int
    hidden: int
    batch: int
    sequence: int
    modern: bool = False
    experts: int = 0

    @property
    def head_width(self) -> int:
        return self.width // self.heads

    @property
    def grouped(self) -> bool:
        """Whether heads of queries share heads of keys and values."""
        return self.key_heads != self.heads

    @property
    def block_weights(self) -> int:
        """Weights of the linear layers of one block, and of its router."""
        return self._attention_weights + max(1, self.experts) * self._expert_weights + self.experts * self.width

    @property
    def _attention_weights(self) -> int:
        return self.width * (2 * self.width + 2 * self.key_heads * self.head_width)

    @property
    def _expert_weights(self) -> int:
        return (3 if self.modern else 2) * self.width * self.hidden

    @property
    def weights(self) -> int:
        """All that are trained, norms and positions left out."""
        return self.layers * self.block_weights + 2 * self.vocabulary * self.width

    def step_flops(self, sequences: int, length: int) -> float:
        """Forward and backward: 6 FLOPs a weight that a token goes through, and causal attention's products."""
        tokens = sequences * length
        block = self._attention_weights + (CHOSEN if self.experts else 1) * self._expert_weights
        linear = 6.0 * tokens * (self.layers * block + self.vocabulary * self.width)
        # Scores and their product with the values: 4 T^2 w a sequence forward, twice that backward, half masked.
        attention = 12.0 * sequences * self.layers * length * length * self.width / 2
        return linear + attention


def expert_layers(config: GPTConfig) -> tuple[Layer, ...]:
    """The same of a model whose feed-forward blocks are experts."""
    return tuple(
        Layer(layer.name.replace("mlp.", f"mlp.experts.{number}."), layer.kind, layer.high)
        for layer in gpt_layers(config.layers)
        for number in (range(config.experts) if ".mlp." in layer.name else (0,))
    )


def gpt_layers(blocks: int) -> tuple[Layer, ...]:
    """The layers of a GPT of so many blocks, by their path in it; the head stays high unless mapped."""
    parts = (("attn.qkv", "attn"), ("attn.out", "attn"), ("mlp.up", "mlp"), ("mlp.down", "mlp"))
    own = (Layer(f"blocks.{block}.{part}", kind) for block in range(blocks) for part, kind in parts)
    return (*own, Layer("head", "head", high=True))


# Tokens that an MLP sees before the one that it foretells, and tokens in a line of a text that is convolved.
CONTEXT = 8
LINE = 16

SIZES = {
    "nano": GPTConfig(256, 192, 2, 4, 4, 768, batch=2, sequence=96),
    "micro": GPTConfig(256, 256, 4, 4, 4, 1024, batch=8, sequence=128),
    "gpt2-124m": GPTConfig(50304, 768, 12, 12, 12, 3072, batch=8, sequence=1024),
    "gpt-350m": GPTConfig(50304, 1024, 24, 16, 16, 4096, batch=8, sequence=1024),
    "llama-1b": GPTConfig(128256, 2048, 16, 32, 8, 8192, batch=2, sequence=2048, modern=True),
}

# Trained on Python's own sources, and shipped: ids are ASCII.
NANO_PYTHON = GPTConfig(128, 64, 4, 2, 1, 160, batch=8, sequence=256, modern=True)
# Models that are served, each with its longest context as its sequence.
SERVED_SIZES = {
    "nano": GPTConfig(256, 192, 2, 4, 4, 768, batch=1, sequence=16384),
    "nano-llama": GPTConfig(256, 192, 2, 6, 2, 512, batch=1, sequence=16384, modern=True),
    "nano-python": NANO_PYTHON,
    "micro": GPTConfig(256, 256, 4, 4, 4, 1024, batch=1, sequence=16384),
    "gpt2": GPTConfig(50257, 768, 12, 12, 12, 3072, batch=1, sequence=1024),
    "gpt-350m": GPTConfig(50304, 1024, 24, 16, 16, 4096, batch=1, sequence=1024),
    "llama-1b": GPTConfig(128256, 2048, 16, 32, 8, 8192, batch=1, sequence=131072, modern=True),
    "llama3-8b": GPTConfig(128256, 4096, 32, 32, 8, 14336, batch=1, sequence=131072, modern=True),
}


# (output features, input features), by layer.
Features = dict[str, tuple[int, int]]

# The layers of a block. Attention's input products are fused, as are gate and up.
MODELS: dict[str, Features] = {
    "gpt2": {"qkv": (2304, 768), "out": (768, 768), "up": (3072, 768), "down": (768, 3072)},
    "llama3-8b": {"qkv": (6144, 4096), "out": (4096, 4096), "gate_up": (28672, 4096), "down": (4096, 14336)},
    "llama3-70b": {"qkv": (10240, 8192), "out": (8192, 8192), "gate_up": (57344, 8192), "down": (8192, 28672)},
    "deepseek-v3": {
        "q_a_kv_a": (2112, 7168), "q_b": (24576, 1536), "kv_b": (32768, 512), "out": (7168, 16384),
        "expert_gate_up": (4096, 7168), "expert_down": (7168, 2048),
    },
}  # fmt: skip
# The layer above all blocks: (ids of the vocabulary, width).
HEADS: dict[str, tuple[int, int]] = {
    "gpt2": (50257, 768), "llama3-8b": (128256, 4096), "llama3-70b": (128256, 8192), "deepseek-v3": (129280, 7168),
}  # fmt: skip
PRODUCTS: dict[str, tuple[Role, Role]] = {
    "forward": (Role.INPUT, Role.WEIGHT),
    "input-gradient": (Role.GRADIENT, Role.WEIGHT),
    "weight-gradient": (Role.GRADIENT, Role.INPUT),
}
# What is turned for a product: recipes may rotate it, or leave it in high precision.
TURNED: dict[str, tuple[Role, ...]] = {
    "forward": (),
    "input-gradient": (Role.WEIGHT,),
    "weight-gradient": (Role.GRADIENT, Role.INPUT),
}


def sides_of(product: str, tokens: int, outputs: int, inputs: int) -> tuple[int, int, int]:
    if product == "forward":
        return tokens, outputs, inputs
    if product == "input-gradient":
        return tokens, inputs, outputs
    return outputs, inputs, tokens


def models() -> tuple[str, ...]:
    return (*MODELS, *SIZES)


def features_of(model: str) -> Features:
    if model in SIZES:
        return of_config(SIZES[model])
    return {**MODELS[model], "head": HEADS[model]}


def usual_tokens(model: str) -> int:
    """Rows of activations in a step of a model: a trained one's own batch, else what the suite gemm takes on a GPU."""
    return SIZES[model].batch * SIZES[model].sequence if model in SIZES else 8192


def of_config(config: GPTConfig) -> Features:
    width = config.width
    return {
        "qkv": (width + 2 * config.key_heads * config.head_width, width),
        "out": (width, width),
        "up": (config.hidden * (2 if config.modern else 1), width),
        "down": (width, config.hidden),
        "head": (config.vocabulary, width),
    }


# A small model, trained until its loss has come down from chance to what letters are worth.
TRAINED_SIZE = "nano"
TRAINED_BATCH = 4
TRAINING_STEPS = 40
# So many last steps are captured: what a scale that comes from earlier steps needs.
CAPTURED_STEPS = 8


@dataclass(frozen=True)
class CapturedTensor:
    """One operand of one layer: its layer's kind and name, its role, and its shape, contraction last."""

    kind: str
    layer: str
    role: Role
    rows: int
    columns: int


def _captured() -> dict[str, CapturedTensor]:
    config = SIZES[TRAINED_SIZE]
    tokens, last = TRAINED_BATCH * config.sequence, f"blocks.{config.layers - 1}"
    # Of a kind the layer whose input is most its own: attention's after a norm, feed-forward's after the activation.
    layers = (
        ("attn", f"{last}.attn.qkv", config.width, 3 * config.width),
        ("mlp", f"{last}.mlp.down", config.hidden, config.width),
        ("head", "head", config.width, config.vocabulary),
    )
    return {
        f"{kind}-{role}": CapturedTensor(kind, name, role, rows, columns)
        for kind, name, inputs, outputs in layers
        for role, rows, columns in (
            (Role.INPUT, tokens, inputs),
            (Role.WEIGHT, outputs, inputs),
            (Role.GRADIENT, tokens, outputs),
        )
    }


# 'attn-input' and so on.
CAPTURED = _captured()
