"""What a trained model scores on tasks, and by metrics of the user's own."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fp8bench.errors import UsageError
from fp8bench.features.train.request import TrainerSettings
from fp8bench.features.train.tasks import METRIC, TASK, TaskItem, items_of
from fp8bench.features.train.values import SeedTask, TrainingText
from fp8bench.nn.around import held
from fp8bench.nn.gpt import LanguageModel
from fp8bench.nn.sizes import LINE, GPTConfig
from fp8bench.plan.bpe import encoded, token_bytes
from fp8bench.protocols import SilentPhases
from fp8bench.user_code import own_words
from fp8bench.user_code.named import named

_TOKENS_A_PASS = 4096
_SILENT = SilentPhases()
# Gives logits (texts, tokens, vocabulary) of tokens.
Predict = Callable[[Tensor], Tensor]


def predicting(model: LanguageModel) -> Predict:
    return lambda tokens: held(model.logits(tokens, _SILENT), model.around["logits"])


class Scores:
    """Those of an arm: on tasks, of a built-in model alone, and by metrics of the user's own."""

    def __init__(
        self, task: SeedTask, settings: TrainerSettings, held_out: Sequence[Any], config: GPTConfig | None = None
    ) -> None:
        self._tasks = None if config is None else TaskScores(settings.tasks, task, config)
        self._metrics, self._held_out = settings.metric, held_out

    def of(self, model: Any) -> Iterator[tuple[str, float]]:
        """A metric is called with the model, or with what gives logits of tokens by a built-in one."""
        called = model if self._tasks is None else predicting(model)
        if self._tasks is not None:
            yield from self._tasks.of(called)
        for metric in self._metrics:
            yield from measured(metric, called, self._held_out)


class TaskScores:
    """The questions of some tasks, and how many of them a model answers."""

    def __init__(self, tasks: Sequence[str], task: SeedTask, config: GPTConfig) -> None:
        self._config, self._device, self._merges = config, task.facts.key, task.text.merges
        self._items = _items(tuple(tasks), task.text, config.sequence)

    def of(self, predict: Predict) -> Iterator[tuple[str, float]]:
        """The share of right answers by the name of its figure; not a number where a model's are none."""
        for name, items in self._items.items():
            rows, lengths = self._rows([text for item in items for text in item.texts])
            step = max(1, _TOKENS_A_PASS // rows.shape[1])
            parts = [(rows[at : at + step], lengths[at : at + step]) for at in range(0, len(rows), step)]
            if items[0].places:
                logs = torch.cat([_chosen(predict, part, items[0]) for part, _ in parts])
            else:
                logs = torch.cat([_whole(predict, *part) for part in parts]).view(len(items), 1, -1)
            right = torch.tensor([item.right for item in items], device=logs.device)
            yield f"{TASK}{name}", float(_rightness(logs, right).mean())

    def _rows(self, texts: Sequence[bytes]) -> tuple[Tensor, Tensor]:
        """As rows of one length, filled up behind their end, where nothing before it sees that."""
        lines = [np.frombuffer(encoded(text, self._merges), dtype=np.uint16) for text in texts]
        length = -(-max(map(len, lines)) // LINE) * LINE
        rows = np.full((len(lines), min(length, self._config.sequence)), ord("\n"), dtype=np.int64)
        for row, line in zip(rows, lines, strict=True):
            row[: len(line)] = line
        lengths = torch.tensor([len(line) for line in lines])
        return torch.from_numpy(rows).to(self._device), lengths.to(self._device)


@lru_cache(maxsize=1)
def _items(tasks: Sequence[str], text: TrainingText, sequence: int) -> dict[str, list[TaskItem]]:
    """The same for all arms. Raises UsageError for a text that has no bytes, or no words."""
    if text.tokens == "given" and tasks:
        raise UsageError("--tasks asks questions of bytes, and nobody knows what tokens of a .bin stand for.")
    held_out = _bytes_of(text) if "cloze" in tasks else b""
    return {name: items for task in tasks for name, items in items_of(task, sequence, held_out)}


def _bytes_of(text: TrainingText) -> bytes:
    """The held-out text."""
    span = text.held_out
    known = token_bytes(text.merges)
    tokens = np.memmap(span.path, dtype=np.uint16, mode="r")[span.start : span.stop]
    return b"".join(known[token] for token in tokens.tolist())


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
