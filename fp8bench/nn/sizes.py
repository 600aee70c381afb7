"""Sizes of the models that workloads train, and their FLOPs. No torch here: plans read it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class GPTConfig:
    """A model and the step it runs by default. `modern` is Llama's manner: RMS norm, rotary positions, gates."""

    vocabulary: int
    width: int
    layers: int
    heads: int
    key_heads: int
    hidden: int
    batch: int
    sequence: int
    modern: bool = False

    @property
    def head_width(self) -> int:
        return self.width // self.heads

    @property
    def grouped(self) -> bool:
        """Whether heads of queries share heads of keys and values."""
        return self.key_heads != self.heads

    @property
    def block_weights(self) -> int:
        """Weights of the linear layers of one block."""
        attention = self.width * (2 * self.width + 2 * self.key_heads * self.head_width)
        return attention + (3 if self.modern else 2) * self.width * self.hidden

    @property
    def weights(self) -> int:
        """All that are trained, norms and positions left out."""
        return self.layers * self.block_weights + 2 * self.vocabulary * self.width

    def step_flops(self, sequences: int, length: int) -> float:
        """Forward and backward: 6 FLOPs a weight and token, and causal attention's products."""
        tokens = sequences * length
        linear = 6.0 * tokens * (self.layers * self.block_weights + self.vocabulary * self.width)
        # Scores and their product with the values: 4 T^2 w a sequence forward, twice that backward, half masked.
        attention = 12.0 * sequences * self.layers * length * length * self.width / 2
        return linear + attention


SIZES = {
    "nano": GPTConfig(256, 192, 2, 4, 4, 768, batch=2, sequence=96),
    "gpt2-124m": GPTConfig(50304, 768, 12, 12, 12, 3072, batch=8, sequence=1024),
    "gpt-350m": GPTConfig(50304, 1024, 24, 16, 16, 4096, batch=8, sequence=1024),
    "llama-1b": GPTConfig(128256, 2048, 16, 32, 8, 8192, batch=2, sequence=2048, modern=True),
}
