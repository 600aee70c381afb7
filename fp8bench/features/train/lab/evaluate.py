"""Reads windows of a text for training and validation, and computes held-out losses, scores on tasks, and users'
metrics. Windows depend only on the seed and the step. So all arms of a seed read the same windows, also after a resume,
and even if they divide the step into different micro-batches.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fp8bench.errors import UsageError
from fp8bench.features.train.request import TrainerSettings
from fp8bench.features.train.tasks import METRIC_PREFIX, TASK_PREFIX, TaskItem, make_task_items
from fp8bench.features.train.values import SeedTask, TokenSpan, TrainingTokens, Validation
from fp8bench.model import DeviceFacts
from fp8bench.nn.around import cast_to
from fp8bench.nn.gpt import LanguageModel
from fp8bench.nn.linear import use_arithmetics
from fp8bench.nn.sizes import LINE_TOKENS, GPTConfig
from fp8bench.protocols import Arithmetic, Layer, SilentPhases
from fp8bench.registry import precisions
from fp8bench.user_code import own_words
from fp8bench.user_code.named import named

TokenBatch = tuple[Tensor, Tensor]
# Philox's 256-bit counter: bits from 192 on are the step, lower bits count random draws.
_STEP_FIRST_BIT = 192
# Philox returns four random numbers per counter value.
_NUMBERS_PER_RANDOM_COUNTER = 4


class TokenWindows:
    """Reads windows of `length` tokens from a text, as tensors on a device. The targets of a window are the same
    tokens, shifted by one.
    """

    def __init__(self, text: TokenSpan, length: int, device: str) -> None:
        self._tokens = np.memmap(text.path, dtype=np.uint16, mode="r")[text.start : text.stop]
        self._start_count = len(self._tokens) - length
        if self._start_count < 1:
            raise ValueError(
                f"{text.path} has {len(self._tokens)} tokens in this part; a window of {length} tokens needs one more"
            )
        self._start_stride = text.every
        self._length = length
        self._device = device

    def draw(self, seed: int, step: int, micro_batch: int, batch: int) -> TokenBatch:
        """Returns `batch` windows at random positions, which are one micro-batch of a step."""
        return self._make_batch(self._read_ids(self._draw_window_starts(seed, step, micro_batch, batch)))

    def _draw_window_starts(self, seed: int, step: int, micro_batch: int, batch: int) -> NDArray[np.uint64]:
        """Returns random start positions of windows. All versions of numpy return the same positions, because numpy
        guarantees the numbers of Philox for a key and a counter.
        """
        # The micro-batches of a step use consecutive random numbers. So a step reads the same windows, however it is
        # divided.
        counter, offset = divmod(micro_batch * batch, _NUMBERS_PER_RANDOM_COUNTER)
        generator = np.random.Philox(key=seed, counter=(step << _STEP_FIRST_BIT) + counter)
        random_numbers = generator.random_raw(offset + batch)[offset:]
        return random_numbers % np.uint64(-(-self._start_count // self._start_stride)) * np.uint64(self._start_stride)

    def select_spaced_windows(self, batch: int, max_windows: int) -> list[TokenBatch]:
        """Returns at most `max_windows` windows in batches. The windows do not overlap, and are spread evenly over
        the text.
        """
        available_windows = (self._start_count - 1) // self._length + 1
        window_count = min(max_windows, available_windows)
        window_indices = (
            np.arange(window_count, dtype=np.uint64) * np.uint64(available_windows) // np.uint64(window_count)
        )
        window_starts = window_indices * np.uint64(self._length)
        return [
            self._make_batch(self._read_ids(window_starts[first_window_index : first_window_index + batch]))
            for first_window_index in range(0, window_count, batch)
        ]

    def _read_ids(self, starts: NDArray[np.uint64]) -> NDArray[np.uint16]:
        return np.stack([self._tokens[start : start + self._length + 1] for start in starts.tolist()])

    def _make_batch(self, tokens: NDArray[np.uint16]) -> TokenBatch:
        host_ids = torch.from_numpy(tokens.astype(np.int64))
        if self._device != "cpu":
            # A copy from pinned memory runs while the host continues.
            host_ids = host_ids.pin_memory().to(self._device, non_blocking=True)
        return host_ids[:, :-1].contiguous(), host_ids[:, 1:].contiguous()


# A finished model is also evaluated with its layers in each of these precisions. Scales of the training are not used.
# An arm is compared with the reference in the same precision, and the reference with itself in bf16.
QUANTISED_FORMATS = ("bf16", "fp8", "nvfp4")
# A validation reads about 4096 tokens, but at least 16 windows, and about 1024 tokens per forward pass.
_VALIDATED_TOKENS = 4096
_MIN_VALIDATION_WINDOWS = 16
_TOKENS_PER_PASS = 1024
# A loss by position is the average over one of eight equal ranges of a window's positions.
_POSITION_RANGE_COUNT = 8
_SILENT_PHASES = SilentPhases()


# The sum of losses at each position of a window over all windows, and the number of windows.
PositionLossSums = tuple[list[float], int]


@dataclass(eq=False)
class HeldOutEvaluation:
    """Computes losses on the held-out windows. `layers` are the layers whose precision can be set.
    `share_scales_across_ranks` returns a layer's arithmetic with scales that depend on all ranks.
    """

    text: TrainingTokens
    config: GPTConfig
    layers: Sequence[Layer]
    facts: DeviceFacts
    share_scales_across_ranks: Callable[[str, Arithmetic], Arithmetic]

    def __post_init__(self) -> None:
        length = self.config.sequence
        windows = TokenWindows(self.text.held_out, length, self.facts.key)
        # Few long windows fit into 4096 tokens. With fewer than 16 windows, a loss would depend on single sentences.
        max_windows = max(_MIN_VALIDATION_WINDOWS, _VALIDATED_TOKENS // length)
        self.held_out = windows.select_spaced_windows(max(self.config.batch, _TOKENS_PER_PASS // length), max_windows)

    def measure_losses(
        self, model: LanguageModel, row_key: tuple[str, int, int], is_last: bool
    ) -> Iterator[Validation]:
        def make_validation(name: str, sums: PositionLossSums, positions: slice = slice(None)) -> Validation:
            losses = sums[0][positions]
            windows = sums[1]
            tokens = len(losses) * windows
            return Validation(*row_key, name, sum(losses) / tokens, tokens)

        # These windows are the same in every arm and at every validation.
        held_out = self._sum_losses(model)
        yield make_validation("held-out", held_out)
        if not is_last:
            return
        length = self.config.sequence
        positions_per_range = -(-length // _POSITION_RANGE_COUNT)
        for range_start in range(0, length, positions_per_range):
            end = min(range_start + positions_per_range, length)
            yield make_validation(f"position:{range_start}-{end - 1}", held_out, slice(range_start, end))
        for mode in QUANTISED_FORMATS:
            arithmetic = precisions.get(mode).arithmetic(self.facts)
            names = [layer.name for layer in self.layers if not layer.high]
            with use_arithmetics(
                model, {name: self.share_scales_across_ranks(name, arithmetic.layer(name)) for name in names}
            ):
                yield make_validation(f"quantised:{mode}", self._sum_losses(model))

    def _sum_losses(self, model: LanguageModel) -> PositionLossSums:
        losses = torch.zeros(self.config.sequence, dtype=torch.float64, device=self.facts.key)
        for tokens, targets in self.held_out:
            losses += model(tokens, targets, _SILENT_PHASES, "none").view(targets.shape).sum(0, dtype=torch.float64)
        return losses.tolist(), sum(len(tokens) for tokens, _ in self.held_out)


# A function that returns logits (texts, tokens, vocabulary) for token ids (texts, tokens).
PredictLogits = Callable[[Tensor], Tensor]
# Task items are evaluated in batches of about this many tokens.
_TASK_TOKENS_PER_PASS = 4096


@dataclass(eq=False)
class ModelScorer:
    """Scores an arm's model on tasks and by the user's metrics. Tasks need a built-in model, which has a `config`."""

    task: SeedTask
    settings: TrainerSettings
    held_out: Sequence[Any]
    config: GPTConfig | None = None

    def __post_init__(self) -> None:
        self._items: dict[str, list[TaskItem]] = {}
        if self.config is not None:
            self._items = _load_task_items(self.settings.tasks, self.task.text, self.config.sequence)

    def score_model(self, model: Any) -> Iterator[tuple[str, float]]:
        """Yields all scores of a model, each with the name of its figure. A metric is called with the model or, if the
        model is built-in, with a function from tokens to logits.
        """
        predict = model
        if self.config is not None:
            predict = lambda tokens: cast_to(model.logits(tokens, _SILENT_PHASES), model.around["logits"])  # noqa: E731
        yield from self.score_tasks(predict)
        for metric in self.settings.metric:
            yield from measure_user_metric(metric, predict, self.held_out)

    def score_tasks(self, predict: PredictLogits) -> Iterator[tuple[str, float]]:
        """Yields the share of right answers in each task, with the name of its figure. The share is NaN if logits are
        not finite.
        """
        for name, items in self._items.items():
            rows, lengths = self._pad_token_texts([*chain.from_iterable(item.texts for item in items)])
            rows_per_pass = max(1, _TASK_TOKENS_PER_PASS // rows.shape[1])
            batches = [
                (rows[begin_row : begin_row + rows_per_pass], lengths[begin_row : begin_row + rows_per_pass])
                for begin_row in range(0, len(rows), rows_per_pass)
            ]
            if items[0].positions:
                scores = torch.cat([_predict_choice_logits(predict, part, items[0]) for part, _ in batches])
            else:
                scores = torch.cat([_measure_log_probabilities(predict, *part) for part in batches]).view(
                    len(items), 1, -1
                )
            # If several choices have the highest score, they share the point. So a model that always answers the same
            # scores no better than chance.
            correct_choice_indices = torch.tensor([item.right for item in items], device=scores.device)
            yield f"{TASK_PREFIX}{name}", float(_score_answers(scores, correct_choice_indices).mean())

    def _pad_token_texts(self, texts: Sequence[bytes]) -> tuple[Tensor, Tensor]:
        """Returns texts as rows of token ids, padded at the end to equal length, and the length of each text. Padding
        does not change the scores.
        """
        assert self.config is not None
        device = self.task.facts.key
        # A cnn reads texts in lines of LINE_TOKENS tokens.
        row_length = min(-(-max(map(len, texts)) // LINE_TOKENS) * LINE_TOKENS, self.config.sequence)
        rows = torch.tensor([list(text.ljust(row_length, b"\n")) for text in texts], device=device)
        return rows, torch.tensor([len(text) for text in texts], device=device)


@lru_cache(maxsize=1)
def _load_task_items(tasks: tuple[str, ...], text: TrainingTokens, sequence: int) -> dict[str, list[TaskItem]]:
    """Returns the items of each task. Raises UsageError if the training text is given as tokens, or has no words."""
    if text.tokens == "given" and tasks:
        raise UsageError("--tasks needs the bytes of a text, and the tokens of a .bin cannot be decoded. Give a text.")
    held_out = b""
    if "cloze" in tasks:
        held_out_token_span = text.held_out
        tokens = np.memmap(held_out_token_span.path, dtype=np.uint16, mode="r")[
            held_out_token_span.start : held_out_token_span.stop
        ]
        held_out = tokens.astype(np.uint8).tobytes()
    items: dict[str, list[TaskItem]] = {}
    for task in tasks:
        items.update(make_task_items(task, sequence, held_out))
    return items


def _predict_choice_logits(predict: PredictLogits, rows: Tensor, item: TaskItem) -> Tensor:
    """Returns the logits of a task's choices at the positions that the task scores: (texts, positions, choices)."""
    positions, choices = (torch.tensor(list(numbers), device=rows.device) for numbers in (item.positions, item.choices))
    # The model predicts a token from the tokens before it.
    return predict(rows)[:, positions - 1][:, :, choices].double()


def _measure_log_probabilities(predict: PredictLogits, rows: Tensor, lengths: Tensor) -> Tensor:
    """Returns the log-probability of each text, as a tensor (texts)."""
    log_probabilities = predict(rows)[:, :-1].double().log_softmax(-1).gather(-1, rows[:, 1:, None])[..., 0]
    is_unpadded_token = torch.arange(1, rows.shape[1], device=rows.device) < lengths[:, None]
    return log_probabilities.where(is_unpadded_token, 0.0).sum(1)


def _score_answers(scores: Tensor, right_choices: Tensor) -> Tensor:
    """Returns the score of each question: 1 if only the right choice has the highest score, 1/n if n choices share the
    highest score and one of them is right, and otherwise 0. Returns NaN if scores are not finite.
    """
    has_highest_score = scores == scores.amax(-1, keepdim=True)
    item_scores = has_highest_score.gather(-1, right_choices[..., None])[..., 0] / has_highest_score.sum(-1)
    return item_scores.where(scores.isfinite().all(-1), torch.nan)


def measure_user_metric(metric: str, model: Any, held_out: Sequence[Any]) -> Iterator[tuple[str, float]]:
    """Yields the results of a user's metric by figure name: one number, or several. Raises UsageError if the metric
    fails."""
    metric_name = metric.removesuffix("=lower")
    try:
        value = named(metric_name)(model, held_out)
        values = value if isinstance(value, Mapping) else {"": value}
        figures = {
            f"{METRIC_PREFIX}{metric_name}{f'.{name}' if name else ''}": float(number)
            for name, number in values.items()
        }
    except Exception as error:
        raise UsageError(
            f"--metric {metric_name} returned no figure: {own_words(error)}. It is called with the model and the "
            "held-out batches, and has to return a number, or a mapping of names to numbers."
        ) from error
    yield from figures.items()
