"""The losses of a model on text that it was never trained on: held out, of another kind, by position, and quantised."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from fp8bench.model import DeviceFacts
from fp8bench.model.training import TokenSpan, TrainingText, Validation
from fp8bench.nn.gpt import LanguageModel
from fp8bench.nn.linear import multiplied_by
from fp8bench.nn.sizes import GPTConfig
from fp8bench.plan.bpe import token_bytes
from fp8bench.protocols import Arithmetic, Layer, SilentPhases
from fp8bench.registry import precisions
from fp8bench.training.batches import Batch, Windows

# What a trained model is quantised to, each layer anew from its weights: nothing of the training's scales is used.
QUANTISED = ("fp8", "nvfp4")
# A look reads about so many tokens, in so many windows at least, and so many of them at a time.
_TOKENS = 4096
_LEAST_WINDOWS = 16
_TOKENS_A_PASS = 1024
# Positions are told in so many parts of a window.
_PARTS = 8
_SILENT = SilentPhases()
Scaled = Callable[[str, Arithmetic], Arithmetic]


@dataclass(frozen=True)
class _Sums:
    """Over all windows of a look, by position: losses, and bytes if they are known."""

    losses: list[float]
    bytes: list[int] | None
    windows: int

    def told(self, arm: str, seed: int, step: int, of: str, part: slice = slice(None)) -> Validation:
        losses = self.losses[part]
        tokens = len(losses) * self.windows
        stood_for = None if self.bytes is None else sum(self.bytes[part])
        return Validation(arm, seed, step, of, sum(losses) / tokens, tokens, stood_for)


class Evaluation:
    """The windows to look at, always the same ones, and the losses of a model on them.

    `layers` are those that take a precision, by their path in the model; `scaled` gives an arithmetic of one of them
    the scales that ranks share.
    """

    def __init__(
        self, text: TrainingText, config: GPTConfig, layers: Sequence[Layer], facts: DeviceFacts, scaled: Scaled
    ) -> None:
        self._scaled = scaled
        self._config, self._layers, self._facts = config, layers, facts
        lengths = [] if text.tokens == "given" else [len(one) for one in token_bytes(text.merges)]
        self._lengths = torch.tensor(lengths, device=facts.key) if lengths else None
        self._held_out = self._windows(text.held_out)
        self._other = None if text.other is None else self._windows(text.other)

    def _windows(self, span: TokenSpan) -> list[Batch]:
        length = self._config.sequence
        batch = max(self._config.batch, _TOKENS_A_PASS // length)
        windows = Windows(span, length, self._facts.key, self._config.vocabulary)
        return windows.in_order(batch, max(_LEAST_WINDOWS, _TOKENS // length))

    def look(self, model: LanguageModel, who: tuple[str, int, int], last: bool) -> Iterator[Validation]:
        """What a model's losses are, for an arm in a seed after so many steps: the `last` look says more."""
        held_out = self._sums(model, self._held_out)
        yield held_out.told(*who, "held-out")
        if not last:
            return
        length = self._config.sequence
        part = -(-length // _PARTS)
        for first in range(0, length, part):
            end = min(first + part, length)
            yield held_out.told(*who, f"position:{first}-{end - 1}", slice(first, end))
        if self._other is not None:
            yield self._sums(model, self._other).told(*who, "other-text")
        for mode in QUANTISED:
            arithmetic = precisions.get(mode).arithmetic(self._facts)
            names = [one.name for one in self._layers if not one.high]
            with multiplied_by(model, {one: self._scaled(one, arithmetic.layer(one)) for one in names}):
                yield self._sums(model, self._held_out).told(*who, f"quantised:{mode}")

    def _sums(self, model: LanguageModel, batches: Sequence[Batch]) -> _Sums:
        """Summed on the device, in float64, and read once."""
        losses = torch.zeros(self._config.sequence, dtype=torch.float64, device=self._facts.key)
        lengths = torch.zeros(self._config.sequence, dtype=torch.int64, device=self._facts.key)
        for tokens, targets in batches:
            losses += model(tokens, targets, _SILENT, "none").view(targets.shape).sum(0, dtype=torch.float64)
            if self._lengths is not None:
                lengths += self._lengths[targets].sum(0)
        stood_for = None if self._lengths is None else lengths.tolist()
        return _Sums(losses.tolist(), stood_for, sum(len(tokens) for tokens, _ in batches))


@contextmanager
def undisturbed(model: LanguageModel, arithmetics: Iterable[Arithmetic]) -> Iterator[None]:
    """In eval mode, without gradients; what casts remember is put back at the end: looking changes no step to come."""
    before = [(one, {name: kept.clone() for name, kept in one.memory().items()}) for one in arithmetics]
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        model.train()
        for one, memory in before:
            one.recall(memory)
