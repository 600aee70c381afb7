"""A decoder-only transformer in the manner of GPT-2 or Llama, its parts under their phases.

The caller chooses the arithmetic of each layer by its path in the model: `blocks.0.attn.qkv`, `blocks.0.attn.out`,
`blocks.0.mlp.up`, `blocks.0.mlp.down`, and so on to `head`. Attention scores, softmax and loss stay in high precision;
so do embedding, norms, logits and the residual stream unless `around` gives them another one. The stream has the
carrier's dtype; norms and loss are computed in fp32 (fp64 for the reference).

Also here: the operations between products by themselves, what a backend may fuse into one layer (a norm with the
product behind it, a feed-forward block, a whole block), and `compiled`, a model through torch.compile.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial
from types import FunctionType, MethodType
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from fp8bench.nn.around import cast_to, start_stream
from fp8bench.nn.attention import Core, FusedCore, SelfAttention, recomputed, rotations
from fp8bench.nn.linear import Choose, Linear, region, scoped
from fp8bench.nn.sizes import GPTConfig
from fp8bench.protocols import Arithmetic, Fused, Phases, Role, SilentPhases


class ScaledStream(Protocol):
    """What unit scaling does at the beginning and the end of a model's stream, for a batch of so many tokens."""

    def begin(self, tokens: int) -> None: ...
    def begun(self, x: Tensor) -> Tensor: ...
    def read(self, logits: Tensor) -> Tensor: ...


class Norm(nn.Module):
    """Layer norm or RMS norm in at least fp32, unless an arithmetic says otherwise; the result has x's dtype."""

    arithmetic: Arithmetic | None = None
    epsilon = 1e-5
    unit: Callable[[Tensor], Tensor] | None = None

    def __init__(self, width: int, root_mean_square: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.root_mean_square = root_mean_square

    def forward(self, x: Tensor) -> Tensor:
        given = self.weight if self.unit is None else self.unit(self.weight)
        weight, own = cast_to(given, self.arithmetic, Role.WEIGHT), cast_to(x, self.arithmetic)
        wide, shape = own.to(weight.dtype), weight.shape
        if self.root_mean_square:
            return F.rms_norm(wide, shape, weight, self.epsilon).to(x.dtype)
        return F.layer_norm(wide, shape, weight, None, self.epsilon).to(x.dtype)


class FeedForward(nn.Module):
    """GELU between two products, or Llama's gated form. `unit` replaces the pass of a unit-scaled block."""

    unit: Callable[[FeedForward, Tensor, Phases], Tensor] | None = None

    def __init__(self, width: int, hidden: int, gated: bool, gain: float, choose: Choose) -> None:
        super().__init__()
        self.gated = gated
        self.up = Linear(width, hidden * (2 if gated else 1), choose("up"))
        self.down = Linear(hidden, width, choose("down"), gain)

    def forward(self, x: Tensor, phase: Phases) -> Tensor:
        if self.unit is not None:
            return self.unit(self, x, phase)
        y: Tensor = self.down(self.between(self.up(x, phase)), phase)
        return y

    def between(self, hidden: Tensor) -> Tensor:
        return silu_gate(*hidden.chunk(2, dim=-1)) if self.gated else gelu(hidden)


# Makes a block's feed-forward part; the float is the gain of its last weight.
MakeFeedForward = Callable[[GPTConfig, float, Choose], nn.Module]


class Block(nn.Module):
    """Norm, attention, norm, feed-forward, each with its residual. `unit` replaces the pass of a unit-scaled block."""

    residual: Arithmetic | None = None
    unit: Callable[[Block, Tensor, Phases, Tensor | None], Tensor] | None = None

    def __init__(
        self,
        config: GPTConfig,
        choose: Choose,
        core: Core,
        dropout: float = 0.0,
        feed_forward: MakeFeedForward | None = None,
    ) -> None:
        super().__init__()
        self.dropout = dropout
        self.norm_attn, self.norm_mlp = Norm(config.width, config.modern), Norm(config.width, config.modern)
        gain = 1 / math.sqrt(2 * config.layers)
        attn, mlp = scoped(choose, "attn"), scoped(choose, "mlp")
        self.attn = SelfAttention(config.width, config.heads, config.key_heads, gain, attn, core)
        self.mlp = (
            FeedForward(config.width, config.hidden, config.modern, gain, mlp)
            if feed_forward is None
            else feed_forward(config, gain, mlp)
        )

    def forward(self, x: Tensor, phase: Phases, rotation: Tensor | None) -> Tensor:
        if self.unit is not None:
            return self.unit(self, x, phase, rotation)
        x = cast_to(x + self.added(self.attn, self.norm_attn(x), phase, rotation), self.residual)
        return cast_to(x + self.added(self.mlp, self.norm_mlp(x), phase), self.residual)

    def added(self, part: nn.Module, normed: Tensor, *more: Phases | Tensor | None) -> Tensor:
        """What a part adds to the stream, in the stream's dtype: a layer of another precision returns its carrier."""
        return dropped(part(normed, *more).to(normed.dtype), self.dropout if self.training else 0.0)


class LanguageModel(nn.Module):
    """Tokens and targets in, mean loss out; with reduction 'none' the loss of each token, (batch x tokens).

    `around` has the arithmetics of what the model holds beside its modules; None is high precision.
    """

    carrier: torch.dtype
    around: Mapping[str, Arithmetic | None] = dict.fromkeys(("embedding", "logits", "residual"))
    unit: ScaledStream | None = None

    def forward(self, tokens: Tensor, targets: Tensor, phase: Phases, reduction: str = "mean") -> Tensor:
        if self.unit is not None:
            self.unit.begin(tokens.numel())
        return self.lost(self.logits(tokens, phase), targets, reduction)

    def lost(self, logits: Tensor, targets: Tensor, reduction: str = "mean") -> Tensor:
        read = cast_to(logits, self.around["logits"]) if self.unit is None else self.unit.read(logits)
        return loss_of(read, targets, reduction)

    def looked_up(self, tokens: Tensor, table: Tensor, positions: Tensor | None = None) -> Tensor:
        own = self.around["embedding"]
        x = F.embedding(tokens, cast_to(table, own, Role.WEIGHT))
        if positions is not None:
            x = x + cast_to(positions[: tokens.shape[1]], own, Role.WEIGHT)
        return start_stream(x, self.carrier, self.around["residual"])

    def logits(self, tokens: Tensor, phase: Phases) -> Tensor:
        """Logits of the token that follows each, (batch, tokens, vocabulary)."""
        raise NotImplementedError


class GPT(LanguageModel):
    """With `checkpointing` each block keeps only its input, and is computed again in backward, phases and all. In
    training, `dropout` is the share of what embedding and layers add to the stream that is dropped."""

    rotation: Tensor | None
    # Whether blocks leave more for the loss than the stream, which rules out recomputing them without a record.
    leaves = False

    def __init__(
        self,
        config: GPTConfig,
        choose: Choose,
        carrier: torch.dtype,
        checkpointing: bool = False,
        core: Core | None = None,
        dropout: float = 0.0,
        feed_forward: MakeFeedForward | None = None,
    ) -> None:
        super().__init__()
        core = core or FusedCore()
        self.dropout = dropout
        self.carrier = carrier
        self.checkpointing = checkpointing
        self.embedding = nn.Parameter(torch.randn(config.vocabulary, config.width) * 0.02)
        self.positions = None if config.modern else nn.Parameter(torch.randn(config.sequence, config.width) * 0.01)
        blocks = [scoped(choose, f"blocks.{number}") for number in range(config.layers)]
        self.blocks = nn.ModuleList(Block(config, block, core, dropout, feed_forward) for block in blocks)
        self.norm = Norm(config.width, config.modern)
        tied = self.embedding if config.tied else None
        self.head = Linear(config.width, config.vocabulary, choose("head"), weight=tied)
        self.register_buffer("rotation", rotations(config.sequence, config.head_width) if config.modern else None)

    def logits(self, tokens: Tensor, phase: Phases) -> Tensor:
        return self.read(self.through(self.embedded(tokens), phase, tokens.shape[1]), phase)

    def embedded(self, tokens: Tensor) -> Tensor:
        x = self.looked_up(tokens, self.embedding, self.positions)
        if self.unit is not None:
            x = self.unit.begun(x)
        return dropped(x, self.dropout if self.training else 0.0)

    def through(self, x: Tensor, phase: Phases, length: int) -> Tensor:
        rotation = None if self.rotation is None else self.rotation[:length].to(self.carrier)
        for block in self.blocks:
            if self.checkpointing and self.carrier is torch.float64 and not (self.dropout or self.leaves):
                x = recomputed(partial(block, phase=phase, rotation=rotation), x)
            elif self.checkpointing:
                # Random states need be kept only for dropout.
                x = checkpoint(block, x, phase, rotation, use_reentrant=False, preserve_rng_state=self.dropout > 0)
            else:
                x = block(x, phase, rotation)
        return x

    def read(self, x: Tensor, phase: Phases) -> Tensor:
        y: Tensor = self.head(self.norm(x), phase)
        return y


def loss_of(logits: Tensor, targets: Tensor, reduction: str = "mean") -> Tensor:
    """Cross entropy of (batch, tokens, vocabulary), in at least fp32."""
    wide = logits.reshape(-1, logits.shape[-1]).to(_wide(logits))
    return F.cross_entropy(wide, targets.reshape(-1), reduction=reduction)


def dropped(x: Tensor, share: float) -> Tensor:
    return F.dropout(x, share) if share else x


class Between(nn.Module):
    """One of `OPERATIONS` on (tokens, width), as a layer that takes the phases and marks none."""

    def __init__(self, operation: str, tokens: int, width: int) -> None:
        super().__init__()
        self.function = OPERATIONS[operation](tokens, width)

    def forward(self, *inputs_and_phase: Tensor | Phases) -> Tensor:
        *inputs, _ = inputs_and_phase
        return self.function(*inputs)


class CrossEntropy(nn.Module):
    """Cross entropy with random targets, in at least fp32; summed, because gradients of a mean would vanish in fp16."""

    targets: Tensor

    def __init__(self, tokens: int, width: int) -> None:
        super().__init__()
        self.register_buffer("targets", torch.randint(width, (tokens,)))

    def forward(self, logits: Tensor) -> Tensor:
        return F.cross_entropy(logits.to(_wide(logits)), self.targets, reduction="sum")


def gelu(x: Tensor) -> Tensor:
    return F.gelu(x, approximate="tanh")


def silu_gate(gate: Tensor, value: Tensor) -> Tensor:
    return F.silu(gate) * value


def softmax(x: Tensor) -> Tensor:
    return torch.softmax(x, -1, dtype=_wide(x)).to(x.dtype)


OPERATIONS: dict[str, Callable[[int, int], Callable[..., Tensor]]] = {
    "layer_norm": lambda tokens, width: Norm(width, root_mean_square=False),
    "rms_norm": lambda tokens, width: Norm(width, root_mean_square=True),
    "gelu": lambda tokens, width: gelu,
    "silu_gate": lambda tokens, width: silu_gate,
    "softmax": lambda tokens, width: softmax,
    "residual": lambda tokens, width: torch.add,
    "cross_entropy": CrossEntropy,
}


def _wide(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)


Forward = Callable[[Tensor, Tensor, Phases], Tensor]


def compiled(model: nn.Module, tokens: Tensor, targets: Tensor) -> Forward:
    """The model's loss, compiled forward and backward by a first call with tensors like these.

    A compiled graph gets no phases: the parts of a step are fused and reordered inside. Its code object is a copy:
    torch keeps graphs by code object, for at most eight models, and silently shares or replaces them. Raises where the
    model does not become one graph, or torch.compile is switched off.
    """
    from torch._dynamo.utils import counters  # imports the compiler, so not at the top

    method = type(model).forward
    assert isinstance(method, FunctionType) and method.__closure__ is None
    own = FunctionType(method.__code__.replace(), method.__globals__, method.__name__, method.__defaults__)
    graph = torch.compile(MethodType(own, model), fullgraph=True, dynamic=False)
    unmarked = SilentPhases()  # torch.compile can trace its null contexts
    before = counters["stats"]["unique_graphs"]
    graph(tokens, targets, unmarked).backward()
    for parameter in model.parameters():
        parameter.grad = None
    if counters["stats"]["unique_graphs"] != before + 1:
        raise RuntimeError("torch.compile compiled nothing: is it switched off by TORCH_COMPILE_DISABLE?")

    def forward(tokens: Tensor, targets: Tensor, phase: Phases) -> Tensor:
        loss: Tensor = graph(tokens, targets, unmarked)
        return loss

    return forward


class NormedFeedForward(nn.Module):
    """RMS norm, up, activation, down. Where the arithmetic can, norm and up are one layer, or (`whole`) all of it."""

    def __init__(self, width: int, hidden: int, gated: bool, choose: Choose, whole: bool) -> None:
        super().__init__()
        self.norm = Norm(width, root_mean_square=True)
        self.block = FeedForward(width, hidden, gated, 1.0, choose)
        up, down = self.block.up, self.block.down
        weights = (up.weight, down.weight) if whole else (up.weight,)
        self._whole = whole
        self._fused = up.arithmetic.fused(Fused((self.norm.weight,), weights, gated))

    def forward(self, x: Tensor, phase: Phases) -> Tensor:
        if self._fused is None:
            normed: Tensor = self.block(self.norm(x), phase)
            return normed
        product = region(phase.gemm, self._fused, x)
        if self._whole:
            return product
        hidden = silu_gate(*product.chunk(2, dim=-1)) if self.block.gated else gelu(product)
        y: Tensor = self.block.down(hidden, phase)
        return y


def take_blocks(model: GPT, heads: int) -> None:
    for block in model.blocks:
        assert isinstance(block, Block) and isinstance(block.mlp, FeedForward)
        weights = (block.attn.qkv.weight, block.attn.out.weight, block.mlp.up.weight, block.mlp.down.weight)
        norms = (block.norm_attn.weight, block.norm_mlp.weight)
        taken = block.attn.qkv.arithmetic.fused(Fused(norms, weights, heads=heads))
        if taken is not None:
            vars(block)["forward"] = _without_phases(taken)


def blocks_are_taken(model: GPT) -> bool:
    return any("forward" in vars(block) for block in model.blocks)


def _without_phases(layer: Callable[[Tensor], Tensor]) -> Callable[[Tensor, Phases, Tensor | None], Tensor]:
    return lambda x, phase, rotation: layer(x)
