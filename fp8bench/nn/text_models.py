"""Models of text besides the transformer: an MLP on windows of tokens, and causal convolutions with batch norm.

Like a GPT they take tokens and targets, give the mean loss, and get the arithmetic of each layer by its name; width and
depth are those of a GPT's config.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fp8bench.nn.around import cast_to
from fp8bench.nn.convolution import Convolution, ResidualBlock
from fp8bench.nn.gpt import LanguageModel
from fp8bench.nn.linear import Choose, Linear, prefix_names
from fp8bench.nn.parts import FeedForward, Norm
from fp8bench.nn.sizes import CONTEXT, LINE, GPTConfig
from fp8bench.protocols import Arithmetic, Phases


class WindowMLP(LanguageModel):
    """The last CONTEXT tokens concatenated, one product of them, then feed-forward blocks with residuals."""

    def __init__(self, config: GPTConfig, choose: Choose, carrier: torch.dtype, dropout: float = 0.0) -> None:
        super().__init__(config, carrier, dropout)
        self.window = Linear(CONTEXT * config.width, config.width, choose("window"))
        gain = config.layers**-0.5
        parts = [prefix_names(choose, f"blocks.{number}") for number in range(config.layers)]
        self.norms = nn.ModuleList(Norm(config.width, config.modern) for _ in parts)
        self.blocks = nn.ModuleList(
            FeedForward(config.width, config.hidden, config.modern, gain, part) for part in parts
        )
        self.norm = Norm(config.width, config.modern)
        self.head = Linear(config.width, config.vocabulary, choose("head"))

    def logits(self, tokens: Tensor, phase: Phases) -> Tensor:
        x = self.look_up(tokens)
        windows = F.pad(x, (0, 0, CONTEXT - 1, 0)).unfold(1, CONTEXT, 1).transpose(2, 3).flatten(2)
        residual = self.around["residual"]
        x = cast_to(self.drop(self.window(windows, phase).to(x.dtype)), residual)
        for norm, block in zip(self.norms, self.blocks, strict=True):
            x = cast_to(x + self.drop(block(norm(x), phase)).to(x.dtype), residual)
        return self.head(self.norm(x), phase)


class CausalBlock(ResidualBlock):
    """Two convolutions, each with batch norm or layer norm, ReLU between them, added to the input.

    The text is an image in lines. Shifted down and right by one, each place sees in its 3x3 window itself and places to
    its left, in its own line and the two above: nothing that comes later.
    """

    residual: Arithmetic | None = None

    def __init__(self, channels: int, choose: Choose) -> None:
        super().__init__(channels, choose, running=True)
        # A block begins by adding about as much as the stream holds: at full size it would drown the tokens for long.
        nn.init.constant_(self.norm_second.weight, 0.02)

    def forward(self, x: Tensor, phase: Phases) -> Tensor:
        hidden = F.relu(self.norm_first(convolve_causally(self.first, x, phase)))
        return cast_to(x + self.norm_second(convolve_causally(self.second, hidden, phase)).to(x.dtype), self.residual)


def convolve_causally(convolution: Convolution, x: Tensor, phase: Phases) -> Tensor:
    """A causal 3x3 convolution of (batch, lines, places, channels): each place sees only earlier ones."""
    shifted = F.pad(x, (0, 0, 1, 0, 1, 0)).contiguous()
    return convolution(shifted, phase)[:, :-1, :-1]


class TextCNN(LanguageModel):
    """Convolutions over a text in lines of LINE tokens; in eval mode batch norm uses its kept statistics."""

    def __init__(self, config: GPTConfig, choose: Choose, carrier: torch.dtype, dropout: float = 0.0) -> None:
        super().__init__(config, carrier, dropout)
        parts = [prefix_names(choose, f"blocks.{number}") for number in range(config.layers)]
        self.blocks = nn.ModuleList(CausalBlock(config.width, part) for part in parts)
        self.norm = Norm(config.width, config.modern)
        self.head = Linear(config.width, config.vocabulary, choose("head"))

    def logits(self, tokens: Tensor, phase: Phases) -> Tensor:
        x = self.look_up(tokens.reshape(len(tokens), -1, LINE))
        for block in self.blocks:
            x = self.drop(block(x, phase))
        return self.head(self.norm(x).flatten(1, 2), phase)
