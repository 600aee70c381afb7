"""Values of `infer`: the arms, the question, decode times over contexts, quality token by token, and the whole
answer.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from fp8bench.errors import UsageError
from fp8bench.model import DeviceFacts, Interval, Record
from fp8bench.nn.served import (
    CARRIER_BYTES,
    OWN,
    SERVED_PRECISION,
    ServedArm,
    StepBytes,
    choose_served_arm,
    find_served_shape,
    step_bytes,
)
from fp8bench.nn.sizes import GPTConfig
from fp8bench.registry import precisions
from fp8bench.store.kept_lines import Log

# The fewest contexts to which a line is fitted.
MIN_LINE_CONTEXTS = 4
# The carrier precision (of everything that is not in the low format), if an arm names only a storage format.
LOW_PRECISION_CARRIER = "bf16"


def parse_arm(text: str) -> ServedArm:
    """Parses 'bf16', 'kv=fp8' or 'kv=fp8+weights=int8'. Raises UsageError for anything else."""
    # A precision alone, such as bf16, stands for an arm that stores nothing in a low format.
    if text in CARRIER_BYTES:
        return ServedArm(text)
    try:
        if any(not part.partition("=")[2] for part in text.split("+")):
            raise UsageError(
                f"expected one of {', '.join(CARRIER_BYTES)}, or kv, weights, activations, carrier = a value."
            )
        return choose_served_arm(
            {"kv": OWN, "weights": OWN}, precisions.get(f"{SERVED_PRECISION}:{text.replace('+', ':')}")
        )
    except UsageError as error:
        raise UsageError(f"--arms {text!r} is not an arm: {error} Give one such as kv=fp8+weights=int8.") from None


def format_arm(arm: ServedArm) -> str:
    """Returns the text of an arm, in the syntax of --arms."""
    arm_setting_texts = [f"{key}={value}" for key, value in (("kv", arm.kv), ("weights", arm.weights)) if value]
    arm_setting_texts += ["activations=low"] if arm.low_inputs else []
    if not arm_setting_texts:
        return arm.carrier
    return "+".join([*([] if arm.carrier == LOW_PRECISION_CARRIER else [f"carrier={arm.carrier}"]), *arm_setting_texts])


def arm_precision(arm: ServedArm) -> str:
    return f"{SERVED_PRECISION}:{format_arm(arm).replace('+', ':')}" if arm.kv or arm.weights else arm.carrier


def is_record_of_arm(record: Record, arm: ServedArm) -> bool:
    # Compare canonical names, because several texts may mean the same arm.
    return record.case.precision == precisions.find_canonical_name(arm_precision(arm))


@dataclass(frozen=True)
class ServingQuestion:
    """The arms and sizes to measure. In an answer, the first of `arms` is the reference. `size` names a served model,
    or a user's 'module:function'.

    Without `contexts`, default contexts are measured that fit the model's positions.
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
    def is_user_model(self) -> bool:
        return ":" in self.size


@dataclass(frozen=True)
class ServedModel:
    """The model whose quality is measured. Without a config, `name` is a user's 'module:function'.

    `weights` is a file of bf16 numbers, or with `arm`, the folder of the checkpoint that has this arm's weights. If it
    is '', the weights are random.
    """

    name: str
    config: GPTConfig | None = None
    weights: str = ""
    arm: str = ""
    text: tuple[tuple[int, ...], ...] = ()


@dataclass(frozen=True)
class QualityTask:
    """The input of the quality worker. `tokens` is the number of random tokens for a model that comes without text. The
    first arms, `rolls_out` in number, also sample texts.
    """

    model: ServedModel
    tokens: int
    arms: tuple[ServedArm, ...]
    facts: DeviceFacts
    seed: int
    rolls_out: int = 0


@dataclass(frozen=True)
class ArmQuality:
    """How the predictions of an arm differ from the reference's predictions on the same tokens.

    `kl` is the mean KL divergence over tokens, and `kl_tail` its 99.9% quantile. `same_top` is the share of tokens at
    which arm and reference predict the same next token. `log_perplexity` is the logarithm of the ratio of perplexities.
    `bits` is the stored bits per parameter.
    """

    kl: float
    kl_tail: float
    same_top: float
    log_perplexity: Interval
    bits: float


@dataclass(frozen=True)
class RolloutGap:
    """How the log-probabilities of an arm's sampled tokens differ between reference and arm. A gap is the reference's
    minus the arm's.

    `mean` and `largest` are of the absolute gap. `ratio` is the mean importance ratio exp(gap), which is 1 in
    expectation if arm and reference have the same weights. `least` and `most` are the extremes of the ratio.
    `clipped` is the share of tokens outside PPO's usual clip range. `kl` is the divergence by Schulman's k3
    estimator. `effective` is the effective sample size as a share, first by token, then by text. The weight of a text
    is the product of its tokens' ratios.
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
class ServingQuality:
    """The quality of all arms. `itself` compares two repetitions of the reference, which must give equal
    predictions. `floor` is the noise floor: it compares the reference with itself under a different attention kernel.

    `arms` and `rollouts` have the order of the question's arms. Only `rollouts` include the reference. `caution` warns
    if weights or tokens are random, so that the figures show only the effect of arithmetic.
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
class TokenTimeLine:
    """The line TPOT = a + b * context. TPOT (time per output token) is in seconds. `off` is the largest distance of a
    measured time from the line, relative to the time.
    """

    a: Interval
    b: Interval
    off: float


@dataclass(frozen=True)
class ContextCrossing:
    """Where two lines cross that were fitted to times per output token: the arm's and the reference's.

    `at` is the context length at which they cross, and `low` and `high` are the ends of its interval. `at` is None if
    the lines do not cross, or if this is uncertain. `faster` has two values: whether the arm is faster at the shortest
    measured context length, and whether it is at the longest. A value is None if this is uncertain. `contrary` are the
    context lengths at which the measured times contradict the lines.
    """

    at: float | None
    low: float
    high: float
    faster: tuple[bool | None, bool | None]
    contrary: tuple[int, ...] = ()


@dataclass(frozen=True)
class ArmTimes:
    """Times of one arm. `tpot` is the seconds per output token by context, with the fitted line and its crossing.
    `ttft` is the seconds of the prompt until the first token. `joules` are per token of the prompt and per output
    token.

    If times are missing, `why` is the reason. `kernel` names the native kernel, '' without one. `doubts` are those
    labels of the runs that make a verdict impossible.
    """

    arm: ServedArm
    tpot: tuple[tuple[int, float], ...] = ()
    line: TokenTimeLine | None = None
    crossing: ContextCrossing | None = None
    ttft: float | None = None
    why: str = ""
    joules: tuple[float | None, float | None] = (None, None)
    kernel: str = ""
    doubts: tuple[str, ...] = ()


@dataclass(frozen=True)
class ServingAnswer:
    """All measurements of `infer`. `experts` is how many experts each layer reads in a decode step."""

    question: ServingQuestion
    device: str
    times: tuple[ArmTimes, ...]
    prompt: int
    quality: ServingQuality | None
    bandwidth: float | None = None
    runs: tuple[str, ...] = ()
    finished: bool = True
    experts: float | None = None

    def bytes_read(self, arm: ServedArm) -> StepBytes:
        """Returns the bytes that a decode step reads at the longest context."""
        question = self.question
        return step_bytes(find_served_shape(question.size), arm, question.batch, question.contexts[-1], self.experts)

    def arm_times(self, arm: ServedArm) -> ArmTimes:
        """Returns the times of an arm. They are empty after an interrupt before its first step."""
        return next((times for times in self.times if times.arm == arm), ArmTimes(arm))

    def tpot(self, times: ArmTimes) -> float | None:
        """Returns the arm's seconds per token at the longest context, where arms differ most; None if it was not
        timed.
        """
        return dict(times.tpot).get(self.question.contexts[-1])

    def arm_quality(self, arm: ServedArm) -> ArmQuality | None:
        """Returns the quality of an arm. For the reference, returns the noise floor, which is the smallest difference
        that means anything.
        """
        if self.quality is None:
            return None
        return (self.quality.floor, *self.quality.arms)[self.question.arms.index(arm)]


def open_serving_answer_log(store: Path) -> Log[ServingAnswer]:
    return Log(store / "inference.jsonl", {"inference": ServingAnswer}, "answer of infer", 1, "Choose another --store.")
