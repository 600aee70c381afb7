"""Linear layers of named models, and the three products that each has. No torch here: plans read it."""

from __future__ import annotations

from fp8bench.nn.sizes import SIZES, GPTConfig
from fp8bench.protocols import Role

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


def sides_of(product: str, tokens: int, outputs: int, inputs: int) -> tuple[int, int, int]:
    """M, N, K of a linear layer's product."""
    if product == "forward":
        return tokens, outputs, inputs
    if product == "input-gradient":
        return tokens, inputs, outputs
    return outputs, inputs, tokens


def models() -> tuple[str, ...]:
    """Every model whose layers are known, the trained ones too."""
    return (*MODELS, *SIZES)


def features_of(model: str) -> Features:
    """All linear layers of a model, its head the last."""
    if model in SIZES:
        return of_config(SIZES[model])
    return {**MODELS[model], "head": HEADS[model]}


def usual_tokens(model: str) -> int:
    """Rows of activations in a step of a model: a trained one's own batch, else what the suite gemm takes on a GPU."""
    return SIZES[model].batch * SIZES[model].sequence if model in SIZES else 8192


def of_config(config: GPTConfig) -> Features:
    """The linear layers of a trained model, those of one block and its head."""
    width = config.width
    return {
        "qkv": (width + 2 * config.key_heads * config.head_width, width),
        "out": (width, width),
        "up": (config.hidden * (2 if config.modern else 1), width),
        "down": (width, config.hidden),
        "head": (config.vocabulary, width),
    }
