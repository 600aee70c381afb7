"""The values of a training: its arms, the lines of its stream, and its observer."""

from __future__ import annotations

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
    """Tokens `start` to `stop` - 1 of a file of 16-bit tokens, which is memory-mapped. Windows begin at every
    `every`-th token."""

    path: str
    start: int
    stop: int
    every: int = 1


@dataclass(frozen=True)
class TrainingText:
    """Tokens for training and for validation (held out). `tokens` is 'bytes' (a token per byte) or 'given' (a token
    file, whose bytes are unknown). `identity` identifies the text by its digest."""

    train: TokenSpan
    held_out: TokenSpan
    vocabulary: int
    tokens: str
    identity: str


class ArmRole(StrEnum):
    """A `repeat` is the reference under the same seed, and shows nondeterminism; `one-ulp` has initial weights one unit
    in the last place apart, in the first seed, and shows chaos; `other-rate` is the reference at another learning
    rate, where rates are swept."""

    REFERENCE = "reference"
    CANDIDATE = "candidate"
    REPEAT = "repeat"
    CHAOS = "one-ulp"
    OTHER_RATE = "other-rate"


# Settings of candidates alone.
_PURE: dict[str, Any] = {
    "precision_map": (),
    "scales": (),
    "refresh_scales": None,
    "saturation_bound": None,
    "then": "",
}


@dataclass(frozen=True)
class Arm:
    """One way to train the model: a precision, and settings that differ from the training's. `name` is unique in a
    training. `native`: the device multiplies in this precision; otherwise its speed is meaningless. `skip` is why it
    is not trained."""

    name: str
    precision: str
    role: ArmRole = ArmRole.CANDIDATE
    settings: Params = ()
    native: bool = True
    skip: str = ""

    @property
    def is_band(self) -> bool:
        """Whether it shows the effect of chance on the reference."""
        return self.role.value in BANDS

    def changed(self, then: str) -> Arm:
        """Returns the arm after its change of precision: in all layers, with the scales of each tensor."""
        return replace(self, precision=then, settings=(*self.settings, *_PURE.items()))

    def merge_settings(self, settings: TrainerSettings) -> TrainerSettings:
        """Returns all settings of the arm."""
        own: dict[str, Any] = dict(self.settings)
        pure = {} if self.role is ArmRole.CANDIDATE else _PURE
        return replace(settings, **pure, **own)


@dataclass(frozen=True)
class SeedTask:
    """The task of a worker that trains all arms of one seed."""

    seed: int
    arms: tuple[Arm, ...]
    settings: TrainerSettings
    steps: int
    stride: int
    text: TrainingText
    facts: DeviceFacts


@dataclass(frozen=True)
class ArmState:
    """An arm before its first step. `tokens` is the number per step. `bytes_per_parameter` is the memory between two
    steps, by purpose, as counted from the tensors."""

    arm: str
    parameters: int
    tokens: int
    bytes_per_parameter: tuple[tuple[str, float], ...]


@dataclass(frozen=True)
class Training:
    """A training before its first step, as stored in the first line of its file. Seeds are `seed`, `seed` + 1 and so
    on."""

    id: str
    started: str
    command: str
    request: TrainingRequest
    arms: tuple[Arm, ...]
    device: DeviceFacts
    environment: Environment
    text: TrainingText
    parameters: int

    @property
    def is_watched(self) -> bool:
        """Whether its arms are loops that `fp8bench.watch` saw."""
        return self.text.tokens == WATCHED

    @property
    def compared_arms(self) -> list[Arm]:
        """Returns the reference and the arms compared with it, without those that are not trained."""
        return [arm for arm in self.arms if not arm.skip and not arm.is_band]

    @property
    def cast_arms(self) -> list[Arm]:
        """Returns the arms whose tensors are shown: candidates, and every watched loop."""
        return [arm for arm in self.compared_arms if self.is_watched or arm.role is ArmRole.CANDIDATE]

    def task(self, arms: tuple[Arm, ...], number: int = 0) -> SeedTask:
        request, seed = self.request, self.request.seed + number
        return SeedTask(seed, arms, request.settings, request.steps, request.stride, self.text, self.device)


@dataclass(frozen=True)
class StreamLine:
    """A line of a training's stream, about an arm in a step of a seed; `arm` is '' for the training itself."""

    arm: str
    seed: int
    step: int


L = TypeVar("L", bound=StreamLine)
Lines = Sequence[StreamLine]
# The state of an arm, or of a part of it, as a checkpoint stores it.
State = dict[str, Any]


@dataclass(frozen=True)
class StepRow(StreamLine):
    """The figures of a step. Norms are of all parameters: `gradient_norm` before clipping, which removed the share
    `clipped`, `update_ratio` of the update over that of the weights. `seconds` is 0 for a watched step, whose time
    includes watching. `skipped`: something was not finite, and the weights are unchanged."""

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
    """Figures of one tensor of one layer in a watched step, defined in docs/watching.md. Shares are of all elements.
    `role` is input, weight or gradient (of the output). `scale` is the geometric mean of the scales of blocks, 1
    without scales. `signal_to_noise` is None where nothing was rounded."""

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


# Names of figures. Bytes that an arm keeps between two steps, with their purpose ('weights') as the layer;
BYTES_PER_PARAMETER = "bytes_per_parameter"
# the time of a watched step, watching included;
WATCHED_SECONDS = "watched_seconds"
# bytes that a rank sends to others in a step, with operation and dtype ('all_to_all uint8') as the layer;
WIRE_BYTES = "wire_bytes"
# mistakes of a user's loop, when they begin: gradients are not cleared, the optimizer has lost its moments, or another
# optimizer trains another module.
GRADIENTS_LEFT, MOMENTS_GONE, OTHERS_TRAIN = "gradients_left", "moments_gone", "others_train"
# Stands for the tokens and the maker of loops that `fp8bench.watch` saw.
WATCHED = "watched"
# Kinds of events. A step was not finite;
NOT_FINITE = "not-finite"
# an arm's products are in a precision other than its own;
FALLBACK = "fallback"
# how much of a user's model an arm converts, or to which precision it changes;
COVERAGE = "coverage"
# a user's loop could not be observed for some updates.
UNSEEN = "unseen"


@dataclass(frozen=True)
class StepFigure(StreamLine):
    """An additional figure of a watched step, of one layer, or of all if `layer` is ''; docs/watching.md lists them.
    'memory' is of all arms together, 'device_use' and 'device_memory_use' are of no arm."""

    name: str
    value: float
    layer: str = ""


@dataclass(frozen=True)
class Validation(StreamLine):
    """The loss per token on text that was never trained on; `of` names the part, and how it was evaluated: 'held-out',
    'position:0-127' or 'quantised:fp8'."""

    of: str
    loss: float
    tokens: int


@dataclass(frozen=True)
class TrainingEvent(StreamLine):
    """An event in a step: 'not-finite', 'alarm', 'scale-halved', 'rate-lowered', 'stopped', 'resumed', or one of
    the kinds named above. `layer` and `tensor` say where, `values` what was observed, `remedy` what may help."""

    kind: str
    words: str
    layer: str = ""
    tensor: str = ""
    values: Params = ()
    remedy: str = ""

    @property
    def place(self) -> str:
        """'head output': the layer and tensor; '' for an event of the whole step."""
        return f"{self.layer} {self.tensor}".strip()

    @property
    def sentence(self) -> str:
        """'fp8, seed 0, step 57: the loss is nan (head output). What may help: a lower learning rate'."""
        who = f"{self.arm}, seed {self.seed}, step {self.step}" if self.arm else f"seed {self.seed}"
        where = f" ({self.place})" if self.place else ""
        helps = f". What may help: {self.remedy}" if self.remedy else ""
        return f"{who}: {self.words}{where}{helps}"

    @property
    def rule(self) -> str:
        return str(dict(self.values).get("rule", ""))


@dataclass(frozen=True)
class ArmCost(StreamLine):
    """The cost of one arm, measured in separate passes, each of which makes a line. `kept` is the counted bytes in
    memory between two steps by purpose, `memory` the peak of a step with no other arm in memory, `energy` that of steps
    like the last ones, `capacity` its largest batch. `why` says why the figure is missing."""

    step: int = 0
    kept: tuple[tuple[str, int], ...] = ()
    memory: MemoryUse | None = None
    energy: EnergyUse | None = None
    why: str = ""
    capacity: Capacity | None = None


@dataclass(frozen=True)
class KeptTraining:
    """A training as read from a store, as far as its lines go. `troubles` name what could not be read."""

    training: Training
    lines: tuple[StreamLine, ...]
    finished: bool
    path: str
    troubles: tuple[str, ...] = ()

    @property
    def request(self) -> TrainingRequest:
        return self.training.request

    def of(self, kind: type[L]) -> tuple[L, ...]:
        return tuple(line for line in self.lines if isinstance(line, kind))

    @property
    def alarms(self) -> list[TrainingEvent]:
        return [event for event in self.of(TrainingEvent) if event.kind == "alarm"]


@dataclass(frozen=True)
class WatchedLoops(KeptTraining):
    """Loops that `fp8bench.watch` saw, as the arms of a training."""


@dataclass(frozen=True)
class ModelSweep:
    """Trainings that differ in their model alone."""

    kept: tuple[KeptTraining, ...]
    path: str


@dataclass(frozen=True)
class RankLines:
    """One rank's lines of some steps, and evidence that the ranks still train the same model. `same` are digests of
    what must be equal on all ranks. `batches` has, for each checked step, digests of the tokens that this rank read,
    and of the whole step, of which ranks read `shares` parts. `faults` are errors that this rank found."""

    lines: tuple[StreamLine, ...]
    same: tuple[tuple[str, int], ...] = ()
    batches: tuple[tuple[int, int, int], ...] = ()
    shares: int = 1
    faults: tuple[str, ...] = ()


class TrainingObserver:
    """Receives the progress of a training. This one ignores it."""

    def begun(self, training: Training) -> None:
        """The training starts or resumes."""

    def working(self, arm: str, doing: str) -> None:
        """An arm is measured, outside its steps."""

    def trained(self, number: int, step: int, lines: Sequence[StreamLine]) -> None:
        """Lines of an arm were stored, which is now at `step` of the seed `number`, counted from 0."""

    def note(self, sentence: str) -> None:
        """Something happened that no line records."""
