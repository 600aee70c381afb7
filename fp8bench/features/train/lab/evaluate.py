"""Windows of a text, to train on as a pure function of seed and step and to validate on in their order; the losses on
those, scores on tasks, and metrics of the user's own.

Nothing of a position in the text has to be kept: after a resume the same step reads the same windows, and so do all
arms of a seed. However a step is cut into micro-batches, its windows are the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fp8bench.errors import UsageError
from fp8bench.features.train.request import TrainerSettings
from fp8bench.features.train.tasks import METRIC, TASK, TaskItem, items_of
from fp8bench.features.train.values import SeedTask, TokenSpan, TrainingText, Validation
from fp8bench.model import DeviceFacts
from fp8bench.nn.around import cast_to
from fp8bench.nn.gpt import LanguageModel
from fp8bench.nn.linear import multiplied_by
from fp8bench.nn.sizes import LINE, GPTConfig
from fp8bench.plan.bpe import encoded, token_bytes
from fp8bench.protocols import Arithmetic, Layer, SilentPhases
from fp8bench.registry import precisions
from fp8bench.user_code import own_words
from fp8bench.user_code.named import named

Batch = tuple[Tensor, Tensor]
# Digests are below this.
DIGESTS = 1 << 63
# Of the counter's 256 bits those that count a step's draws, and how many words it has for each count.
_DRAWS_BITS, _WORDS = 192, 4


class TokenWindows:
    """Windows of so many tokens of a text, each with the tokens that follow, on a device."""

    def __init__(self, text: TokenSpan, length: int, device: str, vocabulary: int) -> None:
        self._tokens = np.memmap(text.path, dtype=np.uint16, mode="r")[text.start : text.stop]
        self._places, self._every = len(self._tokens) - length, text.every
        self._length, self._device, self._vocabulary = length, device, vocabulary
        if self._places < 1:
            raise ValueError(f"{text.path} has {len(self._tokens)} tokens here; a window of {length} needs one more")

    def drawn(self, seed: int, step: int, micro_batch: int, batch: int) -> Batch:
        """The windows of a micro-batch: rows `micro_batch` x `batch` and on of the step's."""
        return self._batch(self._ids(self._starts(seed, step, micro_batch, batch)))

    def digest(self, seed: int, step: int, micro_batch: int, batch: int) -> int:
        """A number of what `drawn` reads; those of parts of a step add up to that of the step, modulo 2^63."""
        ids = self._ids(self._starts(seed, step, micro_batch, batch)).astype(np.uint64)
        rows = (ids * np.arange(1, ids.shape[1] + 1, dtype=np.uint64)).sum(1, dtype=np.uint64)
        places = np.arange(micro_batch * batch + 1, (micro_batch + 1) * batch + 1, dtype=np.uint64)
        return int((rows * places).sum(dtype=np.uint64)) % DIGESTS

    def _starts(self, seed: int, step: int, micro_batch: int, batch: int) -> NDArray[np.uint64]:
        """Drawn by a counter: numpy promises the words that Philox makes for a key, whatever its version."""
        blocks, rest = divmod(micro_batch * batch, _WORDS)
        generator = np.random.Philox(key=seed, counter=(step << _DRAWS_BITS) + blocks)
        words = generator.random_raw(rest + batch)[rest:]
        return words % np.uint64(-(-self._places // self._every)) * np.uint64(self._every)

    def in_order(self, batch: int, most: int) -> list[Batch]:
        """At most so many windows that do not overlap, from all parts of the text alike, as batches."""
        every = (self._places - 1) // self._length + 1
        count = min(most, every)
        starts = np.arange(count, dtype=np.uint64) * np.uint64(every) // np.uint64(count) * np.uint64(self._length)
        return [self._batch(self._ids(starts[first : first + batch])) for first in range(0, count, batch)]

    def _ids(self, starts: NDArray[np.uint64]) -> NDArray[np.uint16]:
        return np.stack([self._tokens[start : start + self._length + 1] for start in starts.tolist()])

    def _batch(self, tokens: NDArray[np.uint16]) -> Batch:
        ids = tokens.astype(np.int64)
        if int(ids.max()) >= self._vocabulary:
            raise ValueError(f"the text has token {int(ids.max())}; the model knows those below {self._vocabulary}")
        host = torch.from_numpy(ids)
        if self._device != "cpu":
            host = host.pin_memory().to(self._device, non_blocking=True)
        return host[:, :-1].contiguous(), host[:, 1:].contiguous()


def windows_by_step(
    text: TrainingText, shift: float, steps: int, length: int, device: str, vocabulary: int
) -> tuple[TrainingText, Callable[[int], TokenWindows]]:
    """What each step reads: from that share of the steps on the text of another kind, whose last tenth is held out in
    the text that comes back. Where all steps read it, that tenth is the held-out text, and the first kind is the other.
    """
    first, at = TokenWindows(text.train, length, device, vocabulary), round(shift * steps)
    if at >= steps or text.other is None:
        return text, lambda step: first
    cut = text.other.stop - (text.other.stop - text.other.start) // 10
    later = TokenWindows(replace(text.other, stop=cut - length), length, device, vocabulary)
    held_out = replace(text.other, start=cut)
    if at == 0:
        return replace(text, held_out=held_out, other=text.held_out), lambda step: later
    return replace(text, other=held_out), lambda step: first if step < at else later


# What a trained model is quantised to, each layer anew from its weights: nothing of the training's scales is used. bf16
# is there to hold the others against, whatever an arm was trained in.
QUANTISED = ("bf16", "fp8", "nvfp4")
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
        lengths = [] if text.tokens == "given" else [len(content) for content in token_bytes(text.merges)]
        self._lengths = torch.tensor(lengths, device=facts.key) if lengths else None
        self.held_out = self._windows(text.held_out)
        self._other = None if text.other is None else self._windows(text.other)

    def _windows(self, span: TokenSpan) -> list[Batch]:
        length = self._config.sequence
        batch = max(self._config.batch, _TOKENS_A_PASS // length)
        windows = TokenWindows(span, length, self._facts.key, self._config.vocabulary)
        return windows.in_order(batch, max(_LEAST_WINDOWS, _TOKENS // length))

    def look(self, model: LanguageModel, who: tuple[str, int, int], last: bool) -> Iterator[Validation]:
        held_out = self._sums(model, self.held_out)
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
            names = [layer.name for layer in self._layers if not layer.high]
            with multiplied_by(model, {name: self._scaled(name, arithmetic.layer(name)) for name in names}):
                yield self._sums(model, self.held_out).told(*who, f"quantised:{mode}")

    def _sums(self, model: LanguageModel, batches: Sequence[Batch]) -> _Sums:
        losses = torch.zeros(self._config.sequence, dtype=torch.float64, device=self._facts.key)
        lengths = torch.zeros(self._config.sequence, dtype=torch.int64, device=self._facts.key)
        for tokens, targets in batches:
            losses += model(tokens, targets, _SILENT, "none").view(targets.shape).sum(0, dtype=torch.float64)
            if self._lengths is not None:
                lengths += self._lengths[targets].sum(0)
        stood_for = None if self._lengths is None else lengths.tolist()
        return _Sums(losses.tolist(), stood_for, sum(len(tokens) for tokens, _ in batches))


# Gives logits (texts, tokens, vocabulary) of tokens.
Predict = Callable[[Tensor], Tensor]
# Questions of a task are asked so many tokens at a time.
_TASK_TOKENS_A_PASS = 4096


class Scores:
    """Those of an arm: on tasks, of a built-in model, whose `config` is given, alone, and by the user's own metrics."""

    def __init__(
        self, task: SeedTask, settings: TrainerSettings, held_out: Sequence[Any], config: GPTConfig | None = None
    ) -> None:
        self._metrics, self._held_out, self._config = settings.metric, held_out, config
        self._device, self._merges = task.facts.key, task.text.merges
        self._items = {} if config is None else _items(settings.tasks, task.text, config.sequence)

    def of(self, model: Any) -> Iterator[tuple[str, float]]:
        """A metric is called with the model, or with what gives logits of tokens by a built-in one."""
        called = model
        if self._config is not None:
            called = lambda tokens: cast_to(model.logits(tokens, _SILENT), model.around["logits"])  # noqa: E731
        yield from self.on_tasks(called)
        for metric in self._metrics:
            yield from measured(metric, called, self._held_out)

    def on_tasks(self, predict: Predict) -> Iterator[tuple[str, float]]:
        """The share of right answers by the name of its figure; not a number where a model's are none."""
        for name, items in self._items.items():
            rows, lengths = self._rows([text for item in items for text in item.texts])
            step = max(1, _TASK_TOKENS_A_PASS // rows.shape[1])
            parts = [(rows[at : at + step], lengths[at : at + step]) for at in range(0, len(rows), step)]
            if items[0].places:
                logs = torch.cat([_chosen(predict, part, items[0]) for part, _ in parts])
            else:
                logs = torch.cat([_whole(predict, *part) for part in parts]).view(len(items), 1, -1)
            right = torch.tensor([item.right for item in items], device=logs.device)
            yield f"{TASK}{name}", float(_rightness(logs, right).mean())

    def _rows(self, texts: Sequence[bytes]) -> tuple[Tensor, Tensor]:
        """As rows of one length, filled up behind their end, where nothing before it sees that."""
        assert self._config is not None
        lines = [np.frombuffer(encoded(text, self._merges), dtype=np.uint16) for text in texts]
        length = -(-max(map(len, lines)) // LINE) * LINE
        rows = np.full((len(lines), min(length, self._config.sequence)), ord("\n"), dtype=np.int64)
        for row, line in zip(rows, lines, strict=True):
            row[: len(line)] = line
        lengths = torch.tensor([len(line) for line in lines])
        return torch.from_numpy(rows).to(self._device), lengths.to(self._device)


@lru_cache(maxsize=1)
def _items(tasks: tuple[str, ...], text: TrainingText, sequence: int) -> dict[str, list[TaskItem]]:
    """The same for all arms. Raises UsageError for a text that has no bytes, or no words."""
    if text.tokens == "given" and tasks:
        raise UsageError("--tasks asks questions of bytes, and nobody knows what tokens of a .bin stand for.")
    held_out = b""
    if "cloze" in tasks:
        span, known = text.held_out, token_bytes(text.merges)
        tokens = np.memmap(span.path, dtype=np.uint16, mode="r")[span.start : span.stop]
        held_out = b"".join(known[token] for token in tokens.tolist())
    return {name: items for task in tasks for name, items in items_of(task, sequence, held_out)}


def _chosen(predict: Predict, rows: Tensor, like: TaskItem) -> Tensor:
    """What a model gives each choice at each place, (texts, places, choices)."""
    places, choices = (torch.tensor(list(some), device=rows.device) for some in (like.places, like.choices))
    return predict(rows)[:, places - 1][:, :, choices].double()


def _whole(predict: Predict, rows: Tensor, lengths: Tensor) -> Tensor:
    """The log-probability of each text, (texts)."""
    logs = predict(rows)[:, :-1].double().log_softmax(-1).gather(-1, rows[:, 1:, None])[..., 0]
    inside = torch.arange(1, rows.shape[1], device=rows.device) < lengths[:, None]
    return logs.where(inside, 0.0).sum(1)


def _rightness(logs: Tensor, right: Tensor) -> Tensor:
    """1 where the true choice is the likeliest, a share of it where several are; not a number where they are none."""
    best = logs == logs.amax(-1, keepdim=True)
    share = best.gather(-1, right[..., None])[..., 0] / best.sum(-1)
    return share.where(logs.isfinite().all(-1), torch.nan)


def measured(metric: str, model: Any, held_out: Sequence[Any]) -> Iterator[tuple[str, float]]:
    """What a metric of the user's own says of a model: a number, or numbers by name. Raises UsageError."""
    word = metric.removesuffix("=lower")
    try:
        value = named(word)(model, held_out)
        values = value if isinstance(value, Mapping) else {"": value}
        figures = {f"{METRIC}{word}{f'.{name}' if name else ''}": float(number) for name, number in values.items()}
    except Exception as error:
        raise UsageError(
            f"--metric {word} gives no figure: {own_words(error)}. It is called with the model and the held-out "
            "batches, and gives a number, or a mapping of names to numbers."
        ) from error
    yield from figures.items()
