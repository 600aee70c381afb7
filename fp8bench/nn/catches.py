"""Which tensors are caught from a short training, and of what shape. No torch here: plans read it."""

from __future__ import annotations

from dataclasses import dataclass

from fp8bench.nn.sizes import SIZES
from fp8bench.protocols import Role

# A small model, trained until its loss has come down from chance to what letters are worth.
SIZE = "nano"
BATCH = 4
STEPS = 40
# So many last steps are caught: what a scale that comes from earlier steps needs.
COURSE = 8


@dataclass(frozen=True)
class Catch:
    """One operand of one layer: its layer's kind and name, its role, and its shape, contraction last."""

    kind: str
    layer: str
    role: Role
    rows: int
    columns: int

    @property
    def name(self) -> str:
        """'attn-input'."""
        return f"{self.kind}-{self.role}"


def _catches() -> tuple[Catch, ...]:
    config = SIZES[SIZE]
    tokens, last = BATCH * config.sequence, f"blocks.{config.layers - 1}"
    # Of a kind the layer whose input is most its own: attention's after a norm, feed-forward's after the activation.
    layers = (
        ("attn", f"{last}.attn.qkv", config.width, 3 * config.width),
        ("mlp", f"{last}.mlp.down", config.hidden, config.width),
        ("head", "head", config.width, config.vocabulary),
    )
    return tuple(
        Catch(kind, name, role, rows, columns)
        for kind, name, inputs, outputs in layers
        for role, rows, columns in (
            (Role.INPUT, tokens, inputs),
            (Role.WEIGHT, outputs, inputs),
            (Role.GRADIENT, tokens, outputs),
        )
    )


CATCHES: dict[str, Catch] = {one.name: one for one in _catches()}
