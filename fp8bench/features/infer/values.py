"""Values of `infer`: arms, the question, lines over the context, quality token by token, and the whole answer."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from fp8bench.errors import UsageError
from fp8bench.model import DeviceFacts, Interval, Record
from fp8bench.nn.served import (
    CARRIERS,
    OWN,
    SERVED,
    ServedArm,
    StepBytes,
    arm_of,
    served_shape,
    step_bytes,
)
from fp8bench.nn.sizes import GPTConfig
from fp8bench.registry import precisions
from fp8bench.store.kept_lines import Log

# Fewer contexts make no line.
LEAST_CONTEXTS = 4
# The carrier of an arm that names a format and no carrier.
LOW_CARRIER = "bf16"


def arm_in_words(word: str) -> ServedArm:
    """Parses 'bf16', 'kv=fp8' or 'kv=fp8+weights=int8'. Raises UsageError for anything else."""
    # A carrier alone is an arm without low-precision storage.
    if word in CARRIERS:
        return ServedArm(word)
    try:
        if any(not part.partition("=")[2] for part in word.split("+")):
            raise UsageError(f"expected one of {', '.join(CARRIERS)}, or kv, weights, activations, carrier = a value.")
        return arm_of({"kv": OWN, "weights": OWN}, precisions.get(f"{SERVED}:{word.replace('+', ':')}"))
    except UsageError as error:
        raise UsageError(f"--arms: {word!r} is no arm: {error} Give one such as kv=fp8+weights=int8.") from None


def word_of(arm: ServedArm) -> str:
    """Writes an arm as --arms takes it."""
    parts = [f"{key}={value}" for key, value in (("kv", arm.kv), ("weights", arm.weights)) if value]
    parts += ["activations=low"] if arm.low_inputs else []
    # The usual carrier is left out, so that an arm's name can be parsed again.
    if not parts:
        return arm.carrier
    return "+".join([*([] if arm.carrier == LOW_CARRIER else [f"carrier={arm.carrier}"]), *parts])


def dtype_of(arm: ServedArm) -> str:
    return f"{SERVED}:{word_of(arm).replace('+', ':')}" if arm.kv or arm.weights else arm.carrier


def is_of(record: Record, arm: ServedArm) -> bool:
    # Words for the same arm may differ: their canonical form does not.
    return record.case.precision == precisions.canonical(dtype_of(arm))


@dataclass(frozen=True)
class ServingQuestion:
    """`arms` begin with the reference. `size` is a served model's name, or a custom 'module:function'.

    Without `contexts`, the usual ones within the model's positions are measured.
    """

    size: str
    arms: tuple[ServedArm, ...]
    contexts: tuple[int, ...]
    batch: int
    quick: bool
    tokens: int
    seed: int = 0
    threads: int = 1
    device: str = ""
    rollout: bool = False

    @property
    def is_own(self) -> bool:
        return ":" in self.size


@dataclass(frozen=True)
class ServedModel:
    """The model that quality is read on. Without a config, `name` is a custom 'module:function'.

    `weights` is a file of bf16 numbers, or the folder of a checkpoint that has them of this `arm`, or '' for random
    weights.
    """

    name: str
    config: GPTConfig | None = None
    weights: str = ""
    arm: str = ""
    text: tuple[tuple[int, ...], ...] = ()


@dataclass(frozen=True)
class QualityTask:
    """The input of a worker. `tokens` counts random tokens, for a model that brings no text; the first `rolls_out` arms
    sample texts."""

    model: ServedModel
    tokens: int
    arms: tuple[ServedArm, ...]
    facts: DeviceFacts
    seed: int
    rolls_out: int = 0


@dataclass(frozen=True)
class ArmQuality:
    """One arm's predictions against the reference's, on the same tokens.

    `kl` is the mean over tokens, `kl_tail` its 99.9% quantile. `same_top` is the share of tokens with the reference's
    likeliest successor, `log_perplexity` is ln of the ratio of perplexities, `bits` are stored bits a parameter.
    """

    kl: float
    kl_tail: float
    same_top: float
    log_perplexity: Interval
    bits: float


@dataclass(frozen=True)
class RolloutGap:
    """How the reference's log-probabilities of an arm's sampled tokens differ from the arm's: reference minus arm.

    `mean` and `largest` are of the absolute gap. `ratio` is the mean importance ratio, exp(gap): 1 for the same weights
    in any arithmetic; `least` and `most` are its extremes. `clipped` is the share of tokens beyond PPO's usual clip,
    `kl` the divergence by Schulman's k3, `effective` the effective sample size as a share, by token, and by text with
    the product of its tokens' ratios.
    """

    tokens: int
    mean: float
    largest: float
    kl: float
    ratio: Interval
    least: float
    most: float
    clipped: float
    effective: tuple[float, float]


@dataclass(frozen=True)
class Quality:
    """`itself` is a repetition of the reference, which must not differ; `floor` the reference with a different kernel.

    `arms` and `rollouts` follow the question's order; only `rollouts` include the reference. `caution` is the reason
    why figures only reflect arithmetic, as with random weights.
    """

    model: str
    tokens: int
    perplexity: float
    itself: ArmQuality
    floor: ArmQuality
    arms: tuple[ArmQuality, ...]
    caution: str = ""
    rollouts: tuple[RolloutGap, ...] = ()


@dataclass(frozen=True)
class TimeLine:
    """TPOT = a + b * context, in seconds, and seconds per token of context. `off` is the largest distance of a measured
    context from the line, as a share of its time."""

    a: Interval
    b: Interval
    off: float


@dataclass(frozen=True)
class ContextCrossing:
    """Where an arm's line crosses the reference's; `at` is None if they do not cross, or it is unclear.

    `faster` is whether the arm is faster at the shortest and at the longest context; None if unclear. `contrary` are
    measured contexts that contradict the lines.
    """

    at: float | None
    low: float
    high: float
    faster: tuple[bool | None, bool | None]
    contrary: tuple[int, ...] = ()


@dataclass(frozen=True)
class ArmTimes:
    """One arm's times: TPOT by context, its line and crossing, a prompt's TTFT, joules per token in and out.

    `why` is the reason if they are missing, `kernel` names the kernel ('' without one), and `doubts` are labels of its
    runs that rule out a verdict.
    """

    arm: ServedArm
    tpot: tuple[tuple[int, float], ...] = ()
    line: TimeLine | None = None
    crossing: ContextCrossing | None = None
    ttft: float | None = None
    why: str = ""
    joules: tuple[float | None, float | None] = (None, None)
    kernel: str = ""
    doubts: tuple[str, ...] = ()


@dataclass(frozen=True)
class ServingAnswer:
    """All measurements. `experts` counts those that a step reads per layer."""

    question: ServingQuestion
    device: str
    times: tuple[ArmTimes, ...]
    prompt: int
    quality: Quality | None
    bandwidth: float | None = None
    runs: tuple[str, ...] = ()
    finished: bool = True
    experts: float | None = None

    def bytes_read(self, arm: ServedArm) -> StepBytes:
        """Returns the bytes that a step reads at the longest context."""
        question = self.question
        return step_bytes(served_shape(question.size), arm, question.batch, question.contexts[-1], self.experts)

    def tpot(self, times: ArmTimes) -> float | None:
        """Returns the arm's seconds at the longest context, if it was timed there."""
        # The longest context is where arms differ most.
        return dict(times.tpot).get(self.question.contexts[-1])

    def quality_of(self, arm: ServedArm) -> ArmQuality | None:
        """Returns an arm's quality; for the reference, the noise floor."""
        if self.quality is None:
            return None
        # The reference has no quality against itself: its floor shows what counts as no difference.
        return (self.quality.floor, *self.quality.arms)[self.question.arms.index(arm)]


def kept_answers(store: Path) -> Log[ServingAnswer]:
    return Log(store / "inference.jsonl", {"inference": ServingAnswer}, "answer of infer", 1, "Choose another --store.")
