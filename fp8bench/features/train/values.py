"""A training in several precisions: its arms, what was seen of them step by step, and who is told of it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any, TypeVar

from fp8bench.features.train.request import BANDS, TrainerSettings, TrainingRequest
from fp8bench.model.consumed import Capacity, EnergyUse, MemoryUse
from fp8bench.model.planned import DeviceFacts, Params
from fp8bench.model.run import Environment


@dataclass(frozen=True)
class TokenSpan:
    """A stretch of a file of 16-bit tokens, mapped into memory where it lies: from token `start` to before `stop`.

    Windows begin at every `every`-th of them.
    """

    path: str
    start: int
    stop: int
    every: int = 1


@dataclass(frozen=True)
class TrainingText:
    """Tokens to train on, to validate on (held out), and of another kind if there are any; made ahead of a training.

    `tokens` is 'bytes' (a token a byte), 'bpe' (those from 256 on are `merges` of two tokens each), or 'given' (a token
    file: nobody knows how many bytes its tokens stand for). `identity` says which text, by its digest.
    """

    train: TokenSpan
    held_out: TokenSpan
    other: TokenSpan | None
    vocabulary: int
    tokens: str
    identity: str
    merges: tuple[tuple[int, int], ...] = ()


class ArmRole(StrEnum):
    """What an arm is there for.

    A `repeat` is the reference once more under the same seed: what differs is not deterministic. An `other-seed` is the
    reference with other initial weights and batches: what differs is what seeds do. `one-ulp` has its initial weights
    one unit in the last place apart, in the first seed: what differs is chaos, and no seed knows better. `other-rate`
    is the reference at another rate, where rates are swept.
    """

    REFERENCE = "reference"
    CANDIDATE = "candidate"
    REPEAT = "repeat"
    OTHER_SEED = "other-seed"
    CHAOS = "one-ulp"
    OTHER_RATE = "other-rate"


@dataclass(frozen=True)
class Arm:
    """One way to train the model: a precision, and settings that differ from the training's own.

    `name` is unique in a training. `native` says that the device multiplies in it; where it does not, its speed means
    nothing. `skip` says why it is not trained.
    """

    name: str
    precision: str
    role: ArmRole = ArmRole.CANDIDATE
    settings: Params = ()
    native: bool = True
    skip: str = ""

    @property
    def is_band(self) -> bool:
        """Whether it is there for what chance and other seeds do to the reference."""
        return self.role.value in BANDS

    def taken(self, settings: TrainerSettings) -> TrainerSettings:
        """All settings of the arm: those of its training but for its own. Only candidates take the precision map and
        stored scales."""
        own: dict[str, Any] = dict(self.settings)
        alike: dict[str, Any] = {} if self.role is ArmRole.CANDIDATE else {"precision_map": (), "scales": ()}
        return replace(settings, **alike, **own)


@dataclass(frozen=True)
class SeedTask:
    """What a worker needs to train all arms of one seed beside each other."""

    seed: int
    arms: tuple[Arm, ...]
    settings: TrainerSettings
    steps: int
    stride: int
    text: TrainingText
    facts: DeviceFacts


@dataclass(frozen=True)
class ArmState:
    """An arm as it stands before its first step.

    `tokens` are those of one of its steps. `bytes_per_parameter` are kept between two steps, by what they are for, as
    counted from the tensors that exist.
    """

    arm: str
    parameters: int
    tokens: int
    bytes_per_parameter: tuple[tuple[str, float], ...]


@dataclass(frozen=True)
class Training:
    """A training before its first step: the head of what is kept of it. Seeds are `seed`, `seed` + 1 and so on."""

    id: str
    started: str
    command: str
    request: TrainingRequest
    arms: tuple[Arm, ...]
    device: DeviceFacts
    environment: Environment
    text: TrainingText
    parameters: int

    def task(self, arms: tuple[Arm, ...], number: int = 0) -> SeedTask:
        asked = self.request
        return SeedTask(
            asked.seed + number, arms, asked.settings, asked.steps, asked.stride, self.text, self.device
        )  # fmt: skip


@dataclass(frozen=True)
class StreamLine:
    """A line of the stream of a training: what was seen of an arm in a step of a seed, '' for the training itself."""

    arm: str
    seed: int
    step: int


L = TypeVar("L", bound=StreamLine)


@dataclass(frozen=True)
class StepRow(StreamLine):
    """What every step says. Norms are of all parameters together.

    `gradient_norm` is before clipping, `clipped` the share of it that clipping took away. `update_ratio` is the norm of
    the update over that of the weights. `seconds` is the step's own time, 0 in a step that was watched, whose time is
    not the step's alone. `skipped` says that the weights stayed as they were, because something was not finite.
    """

    loss: float
    rate: float
    gradient_norm: float
    clipped: float
    parameter_norm: float
    update_ratio: float
    loss_scale: float
    tokens: int
    seconds: float
    skipped: bool = False


@dataclass(frozen=True)
class LayerReading(StreamLine):
    """What a watched step says of one tensor of one layer: shares are of all its elements, and docs/watching.md defines
    each figure.

    `role` is one of Role: input, weight, gradient (of the output). `scale` is the middle of those of blocks, and 1
    without any. `signal_to_noise` is None where nothing was rounded.
    """

    layer: str
    role: str
    amax: float
    smallest: float
    mean: float
    deviation: float
    zeros: float
    scale: float = 1.0
    least_scale: float = 1.0
    largest_scale: float = 1.0
    lag: float | None = None
    drift: float | None = None
    underflow: float = 0.0
    saturated: float = 0.0
    signal_to_noise: float | None = None
    not_finite: float = 0.0


# The figure of what an arm keeps between two steps; its layer is what that is for ('weights').
BYTES_PER_PARAMETER = "bytes_per_parameter"
# That of how long a watched step took, watching included.
WATCHED_SECONDS = "watched_seconds"
# That of how long the same step of the reference took beside an arm, where not all arms fit into memory together.
REFERENCE_SECONDS = "reference_seconds"
# That of the bytes that a rank hands to others in a step; its layer is the operation and dtype ('all_to_all uint8').
WIRE_BYTES = "wire_bytes"
# Figures of a loop of somebody's own, in the step in which they came to be so: gradients that were not cleared, an
# optimizer that has forgotten its moments, and another one that trains what the module is not.
GRADIENTS_LEFT, MOMENTS_GONE, OTHERS_TRAIN = "gradients_left", "moments_gone", "others_train"
# A step that was not finite; and that an arm went back before step `to` of its values, and is past the batches of the
# steps from `first` to the event's own, which it takes no more.
NOT_FINITE, REWOUND = "not-finite", "rewound"
# The event of a seed that ends before its last step: its arms have come to the loss that was asked for.
ARRIVED = "arrived"
# The event of an arm that was trained without the reference beside it.
UNPAIRED = "unpaired"


@dataclass(frozen=True)
class StepFigure(StreamLine):
    """A further figure of a watched step by its name, of a layer or, without one, of all; docs/watching.md has all of
    them. 'memory' is of all arms together, 'device_use' and 'device_memory_use' are of none."""

    name: str
    value: float
    layer: str = ""


@dataclass(frozen=True)
class Validation(StreamLine):
    """The loss on text that was never trained on, per token; `of` says which text and how it was read.

    'held-out', 'other-text', 'position:0-127', 'quantised:fp8'. `bytes` is what the tokens stand for, if that is known.
    """

    of: str
    loss: float
    tokens: int
    bytes: int | None

    @property
    def perplexity(self) -> float:
        return _exponential(self.loss)

    @property
    def perplexity_by_byte(self) -> float | None:
        """Of a byte, which compares texts whose tokens differ; None where nobody knows the bytes."""
        return None if not self.bytes else _exponential(self.loss * self.tokens / self.bytes)


# The kind of event that an arm's products are in another precision than its own.
FALLBACK = "fallback"
# The event that says how much of a model of the user's own an arm converts.
COVERAGE = "coverage"
# The event of a loop of somebody's own in which nothing could be seen for some updates.
UNSEEN = "unseen"


@dataclass(frozen=True)
class TrainingEvent(StreamLine):
    """Something that happened in a step: 'not-finite', 'alarm', 'tried-fix', 'scale-halved', 'rate-lowered', 'stopped',
    'resumed', 'pairs' (not all arms fit into memory), REWOUND, ARRIVED, UNPAIRED, FALLBACK, COVERAGE,
    UNSEEN.

    `layer` and `tensor` say where, `values` what was seen there, `remedy` what may help.
    """

    kind: str
    words: str
    layer: str = ""
    tensor: str = ""
    values: Params = ()
    remedy: str = ""


@dataclass(frozen=True)
class ArmCost(StreamLine):
    """What one arm takes, found in a pass of its own; a pass is a line.

    `kept` are the bytes that lie in memory between two steps by what they are for, as counted; `memory` is that of a
    step at its highest point, with no other arm in memory; `capacity` is its largest batch, `energy` that of steps
    like the last ones. `why` says why there is nothing of what was looked for.
    """

    step: int = 0
    kept: tuple[tuple[str, int], ...] = ()
    memory: MemoryUse | None = None
    capacity: Capacity | None = None
    energy: EnergyUse | None = None
    why: str = ""


def _exponential(value: float) -> float:
    try:
        return math.exp(value)
    except OverflowError:
        return math.inf


@dataclass(frozen=True)
class KeptTraining:
    """A training as it was read from a store: its lines as far as they go. `troubles` name what could not be read."""

    training: Training
    lines: tuple[StreamLine, ...]
    finished: bool
    path: str
    troubles: tuple[str, ...] = ()

    def of(self, kind: type[L]) -> tuple[L, ...]:
        return tuple(line for line in self.lines if isinstance(line, kind))


@dataclass(frozen=True)
class RankLines:
    """The lines of some steps, and what shows whether the ranks still train the same model.

    `same` are digests of what all ranks must have alike. `batches` are two digests for each step that was looked at: of
    the sequences that this rank has read, and of all that the step has, of which the ranks read `shares` parts.
    `faults` are what this rank has found wrong itself.
    """

    lines: tuple[StreamLine, ...]
    same: tuple[tuple[str, int], ...] = ()
    batches: tuple[tuple[int, int, int], ...] = ()
    shares: int = 1
    faults: tuple[str, ...] = ()


class TrainingObserver:
    """Told of every slice of a training. This one ignores everything."""

    def begun(self, training: Training) -> None:
        """It starts, or goes on."""

    def working(self, arm: str, doing: str) -> None:
        """Something is done with an arm that is no step of it."""

    def trained(self, number: int, step: int, lines: Sequence[StreamLine]) -> None:
        """Lines of one arm were kept; so far is it in its seed, which are counted from 0."""

    def note(self, sentence: str) -> None:
        """Something happened that no line says."""
