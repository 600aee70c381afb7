"""Windows of a text, for training as a pure function of seed and step, for validation in fixed order; held-out losses,
scores on tasks, and users' metrics.

No position in the text is stored: after a resume a step reads the same windows, and so do all arms of a seed,
regardless of how the step is cut into micro-batches.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import chain
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
from fp8bench.protocols import Arithmetic, Layer, SilentPhases
from fp8bench.registry import precisions
from fp8bench.user_code import own_words
from fp8bench.user_code.named import named

Batch = tuple[Tensor, Tensor]
# Digests are taken modulo this.
DIGESTS = 1 << 63
# Bits of Philox's 256-bit counter that number the draws of a step, and words per count.
_DRAWS_BITS, _WORDS = 192, 4


class TokenWindows:
    """Windows of `length` tokens, each with the tokens that follow, as tensors on a device."""

    def __init__(self, text: TokenSpan, length: int, device: str, vocabulary: int) -> None:
        self._tokens = np.memmap(text.path, dtype=np.uint16, mode="r")[text.start : text.stop]
        self._places, self._every = len(self._tokens) - length, text.every
        self._length, self._device, self._vocabulary = length, device, vocabulary
        if self._places < 1:
            raise ValueError(f"{text.path} has {len(self._tokens)} tokens here; a window of {length} needs one more")

    def draw(self, seed: int, step: int, micro_batch: int, batch: int) -> Batch:
        """Returns rows from `micro_batch` x `batch` on of the step's windows."""
        return self._batch(self._ids(self._starts(seed, step, micro_batch, batch)))

    def digest(self, seed: int, step: int, micro_batch: int, batch: int) -> int:
        """Returns a digest of what `draw` reads; those of the parts of a step add up to the step's, modulo DIGESTS."""
        ids = self._ids(self._starts(seed, step, micro_batch, batch)).astype(np.uint64)
        rows = (ids * np.arange(1, ids.shape[1] + 1, dtype=np.uint64)).sum(1, dtype=np.uint64)
        places = np.arange(micro_batch * batch + 1, (micro_batch + 1) * batch + 1, dtype=np.uint64)
        return int((rows * places).sum(dtype=np.uint64)) % DIGESTS

    def _starts(self, seed: int, step: int, micro_batch: int, batch: int) -> NDArray[np.uint64]:
        """Returns start positions by Philox's counter: numpy guarantees its output for a key in every version."""
        # Jump the counter to the first word of this micro-batch, so that any division of a step reads the same windows.
        blocks, offset = divmod(micro_batch * batch, _WORDS)
        generator = np.random.Philox(key=seed, counter=(step << _DRAWS_BITS) + blocks)
        words = generator.random_raw(offset + batch)[offset:]
        return words % np.uint64(-(-self._places // self._every)) * np.uint64(self._every)

    def in_order(self, batch: int, most: int) -> list[Batch]:
        """Returns at most `most` windows that do not overlap, spread evenly over the text, as batches."""
        all_windows = (self._places - 1) // self._length + 1
        count = min(most, all_windows)
        numbers = np.arange(count, dtype=np.uint64) * np.uint64(all_windows) // np.uint64(count)
        starts = numbers * np.uint64(self._length)
        return [self._batch(self._ids(starts[first : first + batch])) for first in range(0, count, batch)]

    def _ids(self, starts: NDArray[np.uint64]) -> NDArray[np.uint16]:
        return np.stack([self._tokens[start : start + self._length + 1] for start in starts.tolist()])

    def _batch(self, tokens: NDArray[np.uint16]) -> Batch:
        ids = tokens.astype(np.int64)
        if int(ids.max()) >= self._vocabulary:
            raise ValueError(f"the text has token {int(ids.max())}; the model knows those below {self._vocabulary}")
        host = torch.from_numpy(ids)
        if self._device != "cpu":
            # The copy runs while the host goes on.
            host = host.pin_memory().to(self._device, non_blocking=True)
        return host[:, :-1].contiguous(), host[:, 1:].contiguous()


# A trained model is quantised to these from its weights, without the training's scales. The others are compared with
# bf16, regardless of the arm's precision.
QUANTISED = ("bf16", "fp8", "nvfp4")
# A validation reads about this many tokens, in at least this many windows, and this many tokens at a time.
_TOKENS = 4096
_LEAST_WINDOWS = 16
_TOKENS_A_PASS = 1024
# Losses by position are given for this many parts of a window.
_PARTS = 8
_SILENT = SilentPhases()
Scaled = Callable[[str, Arithmetic], Arithmetic]


# Losses by position in a window, summed over this many windows.
Sums = tuple[list[float], int]


class Evaluation:
    """Losses on the validation windows. `layers` take a precision, for which `scaled` gives scales of all ranks."""

    def __init__(
        self, text: TrainingText, config: GPTConfig, layers: Sequence[Layer], facts: DeviceFacts, scaled: Scaled
    ) -> None:
        self._scaled = scaled
        self._config, self._layers, self._facts = config, layers, facts
        length = config.sequence
        windows = TokenWindows(text.held_out, length, facts.key, config.vocabulary)
        # Long windows are few: fewer than these would reduce losses to single sentences.
        most = max(_LEAST_WINDOWS, _TOKENS // length)
        self.held_out = windows.in_order(max(config.batch, _TOKENS_A_PASS // length), most)

    def look(self, model: LanguageModel, place: tuple[str, int, int], last: bool) -> Iterator[Validation]:
        def validation(of: str, sums: Sums, part: slice = slice(None)) -> Validation:
            losses, windows = sums[0][part], sums[1]
            tokens = len(losses) * windows
            return Validation(*place, of, sum(losses) / tokens, tokens)

        # The same windows in every arm and at every validation.
        held_out = self._sums(model)
        yield validation("held-out", held_out)
        if not last:
            return
        length = self._config.sequence
        part = -(-length // _PARTS)
        for first in range(0, length, part):
            end = min(first + part, length)
            yield validation(f"position:{first}-{end - 1}", held_out, slice(first, end))
        for mode in QUANTISED:
            arithmetic = precisions.get(mode).arithmetic(self._facts)
            names = [layer.name for layer in self._layers if not layer.high]
            with multiplied_by(model, {name: self._scaled(name, arithmetic.layer(name)) for name in names}):
                yield validation(f"quantised:{mode}", self._sums(model))

    def _sums(self, model: LanguageModel) -> Sums:
        losses = torch.zeros(self._config.sequence, dtype=torch.float64, device=self._facts.key)
        for tokens, targets in self.held_out:
            losses += model(tokens, targets, _SILENT, "none").view(targets.shape).sum(0, dtype=torch.float64)
        return losses.tolist(), sum(len(tokens) for tokens, _ in self.held_out)


# Returns logits (texts, tokens, vocabulary) for tokens (texts, tokens).
Predict = Callable[[Tensor], Tensor]
# Task items are evaluated this many tokens at a time.
_TASK_TOKENS_A_PASS = 4096


class Scores:
    """An arm's scores on tasks and by the user's metrics. Tasks need a built-in model, and so its `config`."""

    def __init__(
        self, task: SeedTask, settings: TrainerSettings, held_out: Sequence[Any], config: GPTConfig | None = None
    ) -> None:
        self._metrics, self._held_out, self._config = settings.metric, held_out, config
        self._device = task.facts.key
        self._items = {} if config is None else _items(settings.tasks, task.text, config.sequence)

    def of(self, model: Any) -> Iterator[tuple[str, float]]:
        """Yields all scores. A metric receives the model itself or, for a built-in one, a function from tokens to
        logits."""
        called = model
        if self._config is not None:
            called = lambda tokens: cast_to(model.logits(tokens, _SILENT), model.around["logits"])  # noqa: E731
        yield from self.on_tasks(called)
        for metric in self._metrics:
            yield from metric_values(metric, called, self._held_out)

    def on_tasks(self, predict: Predict) -> Iterator[tuple[str, float]]:
        """Yields the share of right answers by the name of its figure; NaN where the logits are not finite."""
        for name, items in self._items.items():
            rows, lengths = self._rows([*chain.from_iterable(item.texts for item in items)])
            step = max(1, _TASK_TOKENS_A_PASS // rows.shape[1])
            parts = [(rows[at : at + step], lengths[at : at + step]) for at in range(0, len(rows), step)]
            if items[0].places:
                logs = torch.cat([_chosen(predict, part, items[0]) for part, _ in parts])
            else:
                logs = torch.cat([_whole(predict, *part) for part in parts]).view(len(items), 1, -1)
            # Ties share the point, so that a constant answer scores no better than chance.
            right = torch.tensor([item.right for item in items], device=logs.device)
            yield f"{TASK}{name}", float(_rightness(logs, right).mean())

    def _rows(self, texts: Sequence[bytes]) -> tuple[Tensor, Tensor]:
        """Returns token ids as rows of equal length, padded at the end, which changes nothing; and the length of each
        text."""
        assert self._config is not None
        lines = [np.frombuffer(text, dtype=np.uint8) for text in texts]
        length = -(-max(map(len, lines)) // LINE) * LINE
        rows = np.full((len(lines), min(length, self._config.sequence)), ord("\n"), dtype=np.int64)
        for row, line in zip(rows, lines, strict=True):
            row[: len(line)] = line
        lengths = torch.tensor([len(line) for line in lines])
        return torch.from_numpy(rows).to(self._device), lengths.to(self._device)


@lru_cache(maxsize=1)
def _items(tasks: tuple[str, ...], text: TrainingText, sequence: int) -> dict[str, list[TaskItem]]:
    """Returns the items of tasks. Raises UsageError for a text whose bytes are unknown, or without words."""
    if text.tokens == "given" and tasks:
        raise UsageError("--tasks needs the bytes of a text, and the tokens of a .bin cannot be decoded. Give a text.")
    held_out = b""
    if "cloze" in tasks:
        span = text.held_out
        tokens = np.memmap(span.path, dtype=np.uint16, mode="r")[span.start : span.stop]
        held_out = tokens.astype(np.uint8).tobytes()
    items: dict[str, list[TaskItem]] = {}
    for task in tasks:
        items.update(items_of(task, sequence, held_out))
    return items


def _chosen(predict: Predict, rows: Tensor, like: TaskItem) -> Tensor:
    """Returns the logits of each choice at each place, (texts, places, choices)."""
    places, choices = (torch.tensor(list(numbers), device=rows.device) for numbers in (like.places, like.choices))
    return predict(rows)[:, places - 1][:, :, choices].double()


def _whole(predict: Predict, rows: Tensor, lengths: Tensor) -> Tensor:
    """Returns the log-probability of each text, (texts)."""
    logs = predict(rows)[:, :-1].double().log_softmax(-1).gather(-1, rows[:, 1:, None])[..., 0]
    inside = torch.arange(1, rows.shape[1], device=rows.device) < lengths[:, None]
    return logs.where(inside, 0.0).sum(1)


def _rightness(logs: Tensor, right: Tensor) -> Tensor:
    """Returns 1 if the true choice is the likeliest, its share among equals, NaN if logits are not finite."""
    best = logs == logs.amax(-1, keepdim=True)
    share = best.gather(-1, right[..., None])[..., 0] / best.sum(-1)
    return share.where(logs.isfinite().all(-1), torch.nan)


def metric_values(metric: str, model: Any, held_out: Sequence[Any]) -> Iterator[tuple[str, float]]:
    """Yields the results of a user's metric: one figure, or several by name. Raises UsageError."""
    word = metric.removesuffix("=lower")
    try:
        value = named(word)(model, held_out)
        values = value if isinstance(value, Mapping) else {"": value}
        figures = {f"{METRIC}{word}{f'.{name}' if name else ''}": float(number) for name, number in values.items()}
    except Exception as error:
        raise UsageError(
            f"--metric {word} returned no figure: {own_words(error)}. It is called with the model and the held-out "
            "batches, and has to return a number, or a mapping of names to numbers."
        ) from error
    yield from figures.items()
