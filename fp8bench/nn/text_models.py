"""Text models other than the transformer: an MLP on windows of tokens, and causal convolutions with batch norm.

Like a GPT they map tokens and targets to the mean loss, and the caller chooses each layer's arithmetic by name. They
have the width and depth of a GPT's config.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fp8bench.nn.around import cast_to
from fp8bench.nn.convolution import Convolution, ResidualBlock
from fp8bench.nn.gpt import LanguageModel
from fp8bench.nn.linear import ChooseArithmetic, Linear, number_layer_parts
from fp8bench.nn.parts import FeedForward, Norm
from fp8bench.nn.sizes import CONTEXT_TOKENS, LINE_TOKENS, GPTConfig
from fp8bench.protocols import Arithmetic, Phases


class WindowMLP(LanguageModel):
    """An MLP on windows of text: concatenates the embeddings of CONTEXT_TOKENS tokens, projects them to the model's
    width, and runs residual MLP blocks.
    """

    def __init__(self, config: GPTConfig, choose: ChooseArithmetic, carrier: torch.dtype, dropout: float = 0.0) -> None:
        super().__init__(config, carrier, dropout)
        self.window = Linear(CONTEXT_TOKENS * config.width, config.width, choose("window"))
        gain = config.layers**-0.5
        arithmetic_choosers = number_layer_parts(choose, "blocks", config.layers)
        self.norms = nn.ModuleList(Norm(config.width, config.is_llama_like) for _ in arithmetic_choosers)
        self.blocks = nn.ModuleList(
            FeedForward(config.width, config.hidden, config.is_llama_like, gain, choose_in_block)
            for choose_in_block in arithmetic_choosers
        )
        self.norm = Norm(config.width, config.is_llama_like)
        self.head = Linear(config.width, config.vocabulary, choose("head"))

    def logits(self, tokens: Tensor, phase: Phases) -> Tensor:
        x = self.look_up_embedding(tokens)
        # The first tokens have fewer predecessors, so fill their windows with zeros.
        windows = F.pad(x, (0, 0, CONTEXT_TOKENS - 1, 0)).unfold(1, CONTEXT_TOKENS, 1).transpose(2, 3).flatten(2)
        residual_arithmetic = self.around["residual"]
        x = cast_to(self.apply_dropout(self.window(windows, phase).to(x.dtype)), residual_arithmetic)
        for norm, block in zip(self.norms, self.blocks, strict=True):
            x = cast_to(x + self.apply_dropout(block(norm(x), phase)).to(x.dtype), residual_arithmetic)
        return self.head(self.norm(x), phase)


class CausalBlock(ResidualBlock):
    """A residual block of two convolutions with batch norm or layer norm, and ReLU between them.

    The text is an image whose rows are lines of text. The input is shifted down and right by one. So the 3x3 window
    of a position covers the position itself and positions to its left, in its line and in the two lines above. It
    never covers a later token.
    """

    residual_arithmetic: Arithmetic | None = None

    def __init__(self, channels: int, choose: ChooseArithmetic) -> None:
        super().__init__(channels, choose, running=True)
        # Start with a small norm weight. With 1, blocks would at first add values as large as the residual stream's,
        # and hide the tokens for many steps.
        nn.init.constant_(self.norm_second.weight, 0.02)

    def forward(self, x: Tensor, phase: Phases) -> Tensor:
        hidden = F.relu(self.norm_first(convolve_causally(self.first, x, phase)))
        return cast_to(
            x + self.norm_second(convolve_causally(self.second, hidden, phase)).to(x.dtype), self.residual_arithmetic
        )


def convolve_causally(convolution: Convolution, x: Tensor, phase: Phases) -> Tensor:
    """Returns a 3x3 convolution of (batch, lines, positions, channels), in which each position reads only itself and
    earlier positions.
    """
    shifted_images = F.pad(x, (0, 0, 1, 0, 1, 0)).contiguous()
    # The shift has added a line and a position, so drop the last ones.
    return convolution(shifted_images, phase)[:, :-1, :-1]


class TextCNN(LanguageModel):
    """Convolutions over a text that is divided into lines of LINE_TOKENS tokens. In eval mode batch norm uses its
    running statistics.
    """

    def __init__(self, config: GPTConfig, choose: ChooseArithmetic, carrier: torch.dtype, dropout: float = 0.0) -> None:
        super().__init__(config, carrier, dropout)
        arithmetic_choosers = number_layer_parts(choose, "blocks", config.layers)
        self.blocks = nn.ModuleList(
            CausalBlock(config.width, choose_in_block) for choose_in_block in arithmetic_choosers
        )
        self.norm = Norm(config.width, config.is_llama_like)
        self.head = Linear(config.width, config.vocabulary, choose("head"))

    def logits(self, tokens: Tensor, phase: Phases) -> Tensor:
        x = self.look_up_embedding(tokens.reshape(len(tokens), -1, LINE_TOKENS))
        for block in self.blocks:
            x = self.apply_dropout(block(x, phase))
        return self.head(self.norm(x).flatten(1, 2), phase)
