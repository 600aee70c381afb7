"""Rules over further figures of layers: embedding, attention scores, statistics of batch norms."""

from __future__ import annotations

import math
from collections import defaultdict, deque
from typing import Any, ClassVar

from fp8bench.analysis.health.remedies import Remedy
from fp8bench.analysis.health.rule import Alarm, Rule, WatchedArm, middle
from fp8bench.model.training import LayerReading, StepFigure
from fp8bench.protocols import Role


class FigureRule(Rule[StepFigure]):
    """A rule over one figure, of every layer by itself; `keep` of them are kept."""

    reads = StepFigure
    figure: ClassVar[str]
    keep: ClassVar[int] = 1

    def __init__(self, arm: WatchedArm) -> None:
        super().__init__(arm)
        self._last: dict[str, deque[float]] = defaultdict(lambda: deque(maxlen=self.keep))

    def see(self, line: StepFigure) -> Alarm | None:
        if line.name != self.figure:
            return None
        last = self._last[line.layer]
        last.append(line.value)
        words = self.judge(line, last)
        return Alarm(words, line.layer, figures=((self.figure, line.value),)) if words else None

    def judge(self, line: StepFigure, last: deque[float]) -> str:
        """The sentence if this is not well; `last` ends with it."""
        raise NotImplementedError


class EmbeddingCollapse(FigureRule):
    """The rows of the embedding become alike: tokens cannot be told from each other."""

    name = "embedding-collapse"
    figure = "embedding_spread"
    keep = 20
    share = 0.75
    window = f"the last {keep} readings"
    threshold = f"below {share:g} of the largest spread among them"
    reason = "an embedding spreads as it learns; weight decay takes 2% in 200 steps of one that stands still"
    remedies = (Remedy.LOWER_RATE, Remedy.HIGHER_MASTER, Remedy.LOOK_AT_LAYER)

    def judge(self, line: StepFigure, last: deque[float]) -> str:
        largest = max(last)
        if not line.value < self.share * largest:
            return ""
        return f"the rows of {line.layer or 'the embedding'} spread {line.value:.3g}, once {largest:.3g}: they collapse"


class LayerStill(Rule[Any]):
    """The weights of one layer hardly change while those of the others do: no gradient reaches them.

    Embeddings are left out: of a large vocabulary few rows are in a batch.
    """

    name = "layer-stands-still"
    reads = LayerReading | StepFigure
    share = 0.1
    keep = 3
    window = f"{keep} readings of a matrix's update, relative to itself, embeddings left out"
    threshold = f"all of them below {share:g} of the median of all matrices, times the least factor of --rates"
    reason = "matrices learn at rates within a factor of four of their median; weight decay alone moves one by 1 to 6%"
    remedies = (Remedy.LOOK_AT_LAYER, Remedy.LAYER_IN_BF16)

    def __init__(self, arm: WatchedArm) -> None:
        super().__init__(arm)
        self._moved: dict[str, float] = {}
        self._embeddings: set[str] = set()
        self._low: dict[str, int] = defaultdict(int)

    def see(self, line: LayerReading | StepFigure) -> Alarm | None:
        if isinstance(line, LayerReading):
            if line.role == Role.WEIGHT:
                self._moved.setdefault(line.layer, math.nan)
            return None
        if line.name == "embedding_spread":
            self._embeddings.add(line.layer)
        matrix = line.layer in self._moved and line.layer not in self._embeddings
        if line.name != "update_ratio" or not matrix or not math.isfinite(line.value):
            return None
        self._moved[line.layer] = line.value
        usual = middle(one for one in self._moved.values() if math.isfinite(one))
        low = line.value < self.share * min(1.0, self.arm.slowest) * usual
        self._low[line.layer] = self._low[line.layer] + 1 if low else 0
        if self._low[line.layer] < self.keep:
            return None
        words = f"a step changes {line.layer} by {line.value:.2g} of itself, and the other layers by {usual:.2g}"
        return Alarm(words, line.layer, figures=(("update_ratio", line.value), ("median", usual)))


class AttentionOverflow(FigureRule):
    """Attention scores so large that softmax picks one key and lets no gradient through."""

    name = "attention-score-overflow"
    figure = "attention_score"
    largest = 88.0
    window = "every reading"
    threshold = f"a score of {largest:g}"
    reason = "e^-88 is the least that fp32 holds as a normal number: beside such a score every other key counts nothing"
    remedies = (Remedy.LOWER_RATE, Remedy.LOOK_AT_LAYER, Remedy.LAYER_IN_BF16)

    def judge(self, line: StepFigure, last: deque[float]) -> str:
        if not line.value >= self.largest:  # NaN is for the rule of tensors that are not finite
            return ""
        return f"attention scores of {line.layer or 'a layer'} reach {line.value:.4g}"


class BatchNormDrift(FigureRule):
    """Running statistics of a batch norm are far from those of its batches: it will not validate as it trains."""

    name = "batch-norm-drift"
    figure = "batch_norm_drift"
    keep = 3
    far = 1.0
    window = f"{keep} readings, from the 6th on: running statistics begin anywhere"
    threshold = f"all of them above {far:g} standard deviations of the batch"
    reason = "a momentum of 0.1 forgets half of what was in 7 steps; between batches means differ by hundredths"
    remedies = (Remedy.LOOK_AT_LAYER, Remedy.LOWER_RATE)

    def __init__(self, arm: WatchedArm) -> None:
        super().__init__(arm)
        self._seen: dict[str, int] = defaultdict(int)

    def judge(self, line: StepFigure, last: deque[float]) -> str:
        self._seen[line.layer] += 1
        if self._seen[line.layer] <= 5 or len(last) < self.keep or not all(abs(one) > self.far for one in last):
            return ""
        far = "infinitely" if math.isinf(line.value) else f"{line.value:.2g} deviations"
        return f"running statistics of {line.layer} are {far} from those of its batches, {len(last)} readings in a row"
