"""The values of a training: its arms, the lines of its stream, and its observer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any, TypeVar

from fp8bench.features.train.request import CHANCE_ARM_ROLES, TrainerSettings, TrainingRequest
from fp8bench.model.consumed import Capacity, EnergyUse, MemoryUse
from fp8bench.model.planned import DeviceFacts, Params
from fp8bench.model.run import Environment


@dataclass(frozen=True)
class TokenSpan:
    """The tokens from `start` to `stop` - 1 of a memory-mapped file of 16-bit tokens. Windows may only begin at every
    `every`-th token.
    """

    path: str
    start: int
    stop: int
    every: int = 1


@dataclass(frozen=True)
class TrainingTokens:
    """The tokens of a training: one part for training, one part for validation (`held_out`). `tokens` is 'bytes' if
    each token is a byte, or 'given' for a token file whose bytes are unknown. `identity` names the text, with its
    digest.
    """

    train: TokenSpan
    held_out: TokenSpan
    vocabulary: int
    tokens: str
    identity: str


def make_empty_text(tokens: str, identity: str = "") -> TrainingTokens:
    """Returns an empty text, for a training whose batches come from the user's code."""
    empty_token_span = TokenSpan("", 0, 0)
    return TrainingTokens(empty_token_span, empty_token_span, 0, tokens, identity)


class ArmRole(StrEnum):
    """The purpose of an arm. A `candidate` is compared with the `reference`. A `repeat` trains the reference again with
    the same seed, and shows nondeterminism. A `one-ulp` arm begins with weights that differ from the reference's by one
    unit in the last place, and shows chaos. It is trained in the first seed only. If learning rates are swept, an
    `other-rate` arm is the reference at one of the other rates.
    """

    REFERENCE = "reference"
    CANDIDATE = "candidate"
    REPEAT = "repeat"
    CHAOS = "one-ulp"
    OTHER_RATE = "other-rate"


# Arms other than candidates always train with these values.
_CANDIDATE_SETTING_DEFAULTS: dict[str, Any] = {
    "precision_map": (),
    "scales": (),
    "refresh_scales": None,
    "saturation_bound": None,
    "then": "",
}


@dataclass(frozen=True)
class Arm:
    """One way to train the model: a precision, and settings that differ from those of the training. Every arm of a
    training has a different `name`. `native` means that the device multiplies in this precision. The speed of any
    other arm is meaningless. `skip` is the reason why the arm is not trained.
    """

    name: str
    precision: str
    role: ArmRole = ArmRole.CANDIDATE
    settings: Params = ()
    native: bool = True
    skip: str = ""

    @property
    def is_chance_arm(self) -> bool:
        """Returns whether the arm is the reference again, with the same or nearly the same initial weights. Such an arm
        shows how much chance changes the loss.
        """
        return self.role.value in CHANCE_ARM_ROLES

    def with_precision(self, precision: str) -> Arm:
        """Returns the arm as it is after its change of precision. All layers then have the given precision, with scales
        computed from each tensor.
        """
        return replace(self, precision=precision, settings=(*self.settings, *_CANDIDATE_SETTING_DEFAULTS.items()))

    def merge_settings(self, settings: TrainerSettings) -> TrainerSettings:
        """Returns the settings of the training, overridden by those of this arm."""
        arm_settings: dict[str, Any] = dict(self.settings)
        setting_defaults = {} if self.role is ArmRole.CANDIDATE else _CANDIDATE_SETTING_DEFAULTS
        return replace(settings, **setting_defaults, **arm_settings)


@dataclass(frozen=True)
class SeedTask:
    """The task of a worker: to train all arms of one seed."""

    seed: int
    arms: tuple[Arm, ...]
    settings: TrainerSettings
    steps: int
    stride: int
    text: TrainingTokens
    facts: DeviceFacts


@dataclass(frozen=True)
class ArmState:
    """An arm before its first step. `tokens` is the number of tokens per step. `bytes_per_parameter` is the memory that
    the arm's tensors use between two steps, by purpose.
    """

    arm: str
    parameters: int
    tokens: int
    bytes_per_parameter: tuple[tuple[str, float], ...]


@dataclass(frozen=True)
class Training:
    """A training before its first step, as stored in the first line of its file. Its seeds are `seed`, `seed` + 1 and
    so on."""

    id: str
    started: str
    command: str
    request: TrainingRequest
    arms: tuple[Arm, ...]
    device: DeviceFacts
    environment: Environment
    text: TrainingTokens
    parameters: int

    @property
    def is_watched(self) -> bool:
        """Returns whether the arms are loops that `fp8bench.watch` has recorded."""
        return self.text.tokens == WATCHED_NAME

    @property
    def compared_arms(self) -> list[Arm]:
        """Returns the reference and the arms that are compared with it, if they are trained."""
        return [arm for arm in self.arms if not arm.skip and not arm.is_chance_arm]

    @property
    def arms_with_casts(self) -> list[Arm]:
        """Returns the arms whose tensors are shown: the candidates or, among recorded loops, every loop."""
        return [arm for arm in self.compared_arms if self.is_watched or arm.role is ArmRole.CANDIDATE]

    def make_task(self, arms: tuple[Arm, ...], seed_number: int = 0) -> SeedTask:
        request = self.request
        seed = self.request.seed + seed_number
        return SeedTask(seed, arms, request.settings, request.steps, request.stride, self.text, self.device)


@dataclass(frozen=True)
class StreamLine:
    """An observation about an arm in one step of a seed: a line of the stream, which is the file of a training. `arm`
    is '' for an observation about the training itself.
    """

    arm: str
    seed: int
    step: int


L = TypeVar("L", bound=StreamLine)
Lines = Sequence[StreamLine]
# A checkpoint stores the state of an arm, or of a part of it, in this form.
State = dict[str, Any]


@dataclass(frozen=True)
class StepRow(StreamLine):
    """The figures of a step. Norms are over all parameters. `gradient_norm` is the norm before clipping, and `clipped`
    the share of this norm that clipping removed. `update_ratio` is the norm of the update divided by the norm of the
    weights. `seconds` is 0 for a watched step, because watching takes time. `skipped` means that the weights did not
    change, because a value was not finite.
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
    """Figures of one tensor of a layer in a watched step (a step in which tensors are measured), as defined in
    docs/watching.md. `zeros`, `underflow`, `saturated` and `not_finite` are shares of all elements. `role` is input,
    weight or gradient (of the layer's output). `scale` is the geometric mean of block scales; 1 without scales.
    `signal_to_noise` is None if nothing was rounded.
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


# Figure: bytes per parameter in memory between two steps. The figure's `layer` names their purpose ('weights').
BYTES_PER_PARAMETER = "bytes_per_parameter"
# Figure: the time of a watched step, including watching.
WATCHED_SECONDS = "watched_seconds"
# Figure: bytes that a rank sends in a step. The figure's `layer` names operation and dtype ('all_to_all uint8').
WIRE_BYTES = "wire_bytes"
# Figures that report mistakes in a user's loop at the step where they begin: gradients are not cleared, the optimizer
# has lost its moments, or a second optimizer updates parameters outside the module.
GRADIENTS_LEFT = "gradients_left"
MOMENTS_GONE = "moments_gone"
OTHERS_TRAIN = "others_train"
# The value of `TrainingTokens.tokens` and `TrainerSettings.make` for loops that `fp8bench.watch` has recorded.
WATCHED_NAME = "watched"
# Event: a step had NaN or infinity.
NOT_FINITE_EVENT = "not-finite"
# Event: the matrix products of an arm are computed in a precision other than the arm's.
FALLBACK_EVENT = "fallback"
# Event: the share of a user's model that an arm converts, or a switch of an arm to a different precision.
COVERAGE_EVENT = "coverage"
# Event: a user's loop could not be observed for some updates.
UNSEEN_EVENT = "unseen"


@dataclass(frozen=True)
class StepFigure(StreamLine):
    """A figure of a watched step that is not in its StepRow. It belongs to one layer or, if `layer` is '', to the whole
    model. docs/watching.md lists the figures. 'memory' (of all arms together), 'device_use' and 'device_memory_use'
    belong to no single arm.
    """

    name: str
    value: float
    layer: str = ""


@dataclass(frozen=True)
class Validation(StreamLine):
    """The loss per token on held-out text. `of` names the part of the text or the way of evaluation, such as
    'held-out', 'position:0-127' or 'quantised:fp8'.
    """

    of: str
    loss: float
    tokens: int


@dataclass(frozen=True)
class TrainingEvent(StreamLine):
    """An event in a step. Its kind is 'alarm', 'scale-halved', 'rate-lowered', 'stopped', 'resumed', 'restarted', 'out'
    (the arm was excluded), or a constant above, such as NOT_FINITE_EVENT. `layer` and `tensor` name the place of the
    event, `values` are the observed values, and `remedy` is a change that may help.
    """

    kind: str
    words: str
    layer: str = ""
    tensor: str = ""
    values: Params = ()
    remedy: str = ""

    @property
    def place(self) -> str:
        """Returns the layer and tensor, such as 'head output'; '' for an event of a complete step."""
        return f"{self.layer} {self.tensor}".strip()

    def describe(self, is_watched: bool = False) -> str:
        """Returns a text such as 'fp8, seed 0, step 57: the loss is nan (head output). What may help: a lower learning
        rate'. The text leaves out the seed if the arm is a watched loop.
        """
        seed = "" if is_watched else f", seed {self.seed}"
        source = f"{self.arm}{seed}, step {self.step}" if self.arm else f"seed {self.seed}"
        text = f"{source}: {self.words}{f' ({self.place})' if self.place and self.layer not in self.words else ''}"
        final_period = "" if text.endswith("?") else "."
        return f"{text}{final_period} What may help: {self.remedy}" if self.remedy else text

    @property
    def rule(self) -> str:
        return str(dict(self.values).get("rule", ""))


@dataclass(frozen=True)
class ArmCost(StreamLine):
    """The cost of one arm. Each figure is measured in a separate pass, and stored in a separate line. `kept` is the
    number of bytes in memory between two steps, by purpose. `memory` is the peak of a step while no other arm is
    loaded. `energy` is that of extra steps after the training. `capacity` is the largest batch that fits into memory.
    `why` is the reason for a missing figure.
    """

    step: int = 0
    kept: tuple[tuple[str, int], ...] = ()
    memory: MemoryUse | None = None
    energy: EnergyUse | None = None
    why: str = ""
    capacity: Capacity | None = None


@dataclass(frozen=True)
class StoredTraining:
    """A training as read from a store, with all lines that could be read. `troubles` has a sentence for each problem
    with the other lines.
    """

    training: Training
    lines: tuple[StreamLine, ...]
    finished: bool
    path: str
    troubles: tuple[str, ...] = ()

    @property
    def request(self) -> TrainingRequest:
        return self.training.request

    def select_lines(self, kind: type[L]) -> tuple[L, ...]:
        return tuple(line for line in self.lines if isinstance(line, kind))

    @property
    def alarms(self) -> list[TrainingEvent]:
        return [event for event in self.select_lines(TrainingEvent) if event.kind == "alarm"]


@dataclass(frozen=True)
class WatchedLoops(StoredTraining):
    """Loops that `fp8bench.watch` has recorded, as the arms of a training."""


@dataclass(frozen=True)
class ModelSweep:
    """Trainings that differ only in their model."""

    kept: tuple[StoredTraining, ...]
    path: str


@dataclass(frozen=True)
class RankTrainingLines:
    """The stream lines of several steps from one rank. `same` has names with digests that must be equal on all ranks,
    because all train the same model.
    """

    lines: tuple[StreamLine, ...]
    same: tuple[tuple[str, int], ...] = ()


class TrainingObserver:
    """Receives the progress of a training. The methods do nothing here, and show the progress in subclasses."""

    def begun(self, training: Training) -> None:
        """Called when the training starts or resumes."""

    def working(self, arm: str, doing: str) -> None:
        """Called when an arm is measured outside of its steps. `doing` describes the measurement."""

    def trained(self, number: int, step: int, lines: Sequence[StreamLine]) -> None:
        """Called after lines of an arm were stored. The arm is now at `step` of the seed `number`, counted from 0."""

    def note(self, sentence: str) -> None:
        """Called with a sentence that the user should see at once."""
