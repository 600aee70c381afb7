"""What is asked of a served model, and what was found: arms, lines over the context, and quality token by token."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from fp8bench.errors import UsageError
from fp8bench.model import DeviceFacts, Interval, Record
from fp8bench.nn.served import (
    CARRIERS,
    KV_FORMATS,
    SERVED,
    WEIGHT_FORMATS,
    ServedArm,
    ServedShape,
    StepBytes,
    check_groups,
    format_parser,
    layer_formats,
    served_shape,
    step_bytes,
)
from fp8bench.nn.sizes import GPTConfig
from fp8bench.protocols.axes import one_of
from fp8bench.registry import precisions
from fp8bench.store.kept_lines import Log

# Fewer are no line.
LEAST_CONTEXTS = 4
_PARSERS = {
    "kv": format_parser(KV_FORMATS), "weights": format_parser(WEIGHT_FORMATS), "carrier": one_of(*CARRIERS),
    "activations": one_of("high", "low"),
}  # fmt: skip


def arm_in_words(word: str, carrier: str) -> ServedArm:
    """'bf16', 'kv=fp8', 'kv=fp8@0-1=bf16+weights=int8'; UsageError for what is none of it."""
    if word in CARRIERS:
        return ServedArm(word)
    arm = ServedArm(carrier)
    for part in word.split("+"):
        key, equals, value = part.partition("=")
        if "@" in key:  # the issue's own spelling of an exception: kv@0-3=bf16
            key, _, layers = key.partition("@")
            value = f"{getattr(arm, key, '') or arm.carrier}@{layers}={value}"
        try:
            if not equals or not value or key not in _PARSERS:
                raise ValueError(f"expected one of {', '.join(CARRIERS)}, or {', '.join(_PARSERS)} = a value")
            _PARSERS[key](value)
        except ValueError as error:
            raise UsageError(f"--arms: {word!r} is no arm: {error}. Give kv=fp8+weights=int8, say.") from None
        given = {"low_inputs": value == "low"} if key == "activations" else {key: value}
        arm = replace(arm, **given)
    return arm


def word_of(arm: ServedArm, carrier: str) -> str:
    """The shortest that says it, beside arms of that carrier."""
    parts = [f"{key}={value}" for key, value in (("kv", arm.kv), ("weights", arm.weights)) if value]
    parts += ["activations=low"] if arm.low_inputs else []
    if not parts:
        return arm.carrier
    return "+".join([*([] if arm.carrier == carrier else [f"carrier={arm.carrier}"]), *parts])


def low_layer(arm: ServedArm, what: str) -> tuple[int, str]:
    layer, _, low = str(getattr(arm, what)).partition("@")[2].partition("=")
    return int(layer), low


def dtype_of(arm: ServedArm) -> str:
    if not (arm.kv or arm.weights):
        return arm.carrier
    options = (("carrier", arm.carrier if arm.carrier != "bf16" else ""), ("kv", arm.kv), ("weights", arm.weights),
               ("activations", "low" if arm.low_inputs else ""))  # fmt: skip
    return ":".join([SERVED, *(f"{key}={value}" for key, value in options if value)])


def is_of(record: Record, arm: ServedArm) -> bool:
    return record.case.precision == precisions.canonical(dtype_of(arm))


def check_arm(arm: ServedArm, shape: ServedShape) -> None:
    """Raise for layers that the model has not, and for rows that no format cuts."""
    for word in (arm.kv, arm.weights):
        layer_formats(word, shape.layers)
    check_groups(shape, arm)


@dataclass(frozen=True)
class ServingQuestion:
    """`arms` begin with the reference. `size` is a served model's name, or a maker's; without `contexts` they are the
    usual ones that it has positions for."""

    size: str
    arms: tuple[ServedArm, ...]
    contexts: tuple[int, ...]
    batch: int
    quick: bool
    tokens: int
    seed: int = 0
    threads: int = 1
    device: str = ""
    check_layers: str = ""
    batches: tuple[int, ...] = ()
    rollout: bool = False

    @property
    def is_own(self) -> bool:
        return ":" in self.size


@dataclass(frozen=True)
class ServedModel:
    """The model that quality is read on. One with a config has `weights` in a file of bf16 numbers, or in the folder of
    a checkpoint as those of an `arm`, or '' for random ones, and `text`. One without is what a maker of that name
    gives, with its own tokens or random ones."""

    name: str
    config: GPTConfig | None = None
    weights: str = ""
    arm: str = ""
    text: tuple[tuple[int, ...], ...] = ()

    @property
    def layers(self) -> int:
        return served_shape(self.name).layers if self.config is None else self.config.layers


@dataclass(frozen=True)
class QualityTask:
    """What a worker needs; `tokens` are as many as a maker's model without text is read on. The first so many of the
    arms roll out."""

    model: ServedModel
    tokens: int
    arms: tuple[ServedArm, ...]
    facts: DeviceFacts
    seed: int
    rolls_out: int = 0


@dataclass(frozen=True)
class ArmQuality:
    """Of one arm on the same tokens as the reference, teacher-forced, from logits kept in fp32.

    `kl` is the mean over tokens, `kl_tail` the 99.9% quantile; `early` and `late` are means over the first and the last
    quarter of positions. `same_top` is the share of tokens whose likeliest next one is the reference's, and
    `parts_at` the first (text, position) where it is not, None where it always is. `streams` are the relative errors
    of what each layer passes on, `log_perplexity` ln of the ratio of perplexities, resampled text by text.
    `bits` are those of a parameter, counted from what is stored.
    """

    kl: float
    kl_tail: float
    early: float
    late: float
    same_top: float
    parts_at: tuple[int, int] | None
    streams: tuple[float, ...]
    log_perplexity: Interval
    bits: float

    @property
    def first_layer(self) -> int | None:
        return next((layer for layer, error in enumerate(self.streams) if error > 0), None)


@dataclass(frozen=True)
class RolloutGap:
    """Of tokens that an arm sampled a step at a time, and that the reference scored at once, as a trainer does what was
    rolled out: the log-probability that the reference gives a token, less the arm's.

    `mean` and `largest` are of its size. `ratio` is the mean of its exponential, the importance ratio, over texts: 1 of
    the same weights, whatever the arithmetic; `least` and `most` are the ends of that. `clipped` is the share of tokens
    that PPO's usual clip takes, `kl` the arm's divergence from the reference (Schulman's k3), and `effective` the share
    of samples that the ratios leave, by token, and by text with the product of its tokens' ratios.
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
    """`itself` is the reference once more, which must be no different; `floor` is the reference by another kernel;
    `arms` are all others, in the order they were asked for. `caution` says why it is arithmetic only. `rollouts` are of
    all arms, the reference's own first: its steps against itself at once."""

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
    """TPOT = a + b * context: seconds, and seconds a token of context, with the largest distance of a measured context
    from the line as a share of its time."""

    a: Interval
    b: Interval
    off: float


@dataclass(frozen=True)
class ContextCrossing:
    """Where one arm's line crosses the reference's: None where neither is sure to be faster at both measured ends.

    `faster` says whether the arm is sure to be faster at the shortest and at the longest context; None is not sure.
    """

    at: float | None
    low: float
    high: float
    faster: tuple[bool | None, bool | None]


@dataclass(frozen=True)
class ArmTimes:
    """One arm's times: TPOT by context, its line and its crossing, TTFT of a prompt, joules a token in and out.

    `why` says why it has none; `kernel` what multiplies, '' where nothing of its own does; `doubts` are labels that
    leave a verdict of the runs nothing to judge."""

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
class BatchGain:
    """Up to how many rows an arm pays: crossings (rows, low, high, whether it begins to pay), or where there is none
    whether it `pays` at all, None for what nobody can tell. `worst` are the rows where it loses most and `cause` what
    by, '' where it surely loses nowhere; below `computed` rows its product is bound by the bytes of its weight."""

    arm: ServedArm
    crossings: tuple[tuple[float, float, float, bool], ...]
    pays: bool | None
    worst: int
    cause: str
    computed: float | None


@dataclass(frozen=True)
class BatchSweep:
    """Of a layer's product. Past `bound` rows the reference's own is bound by arithmetic, so that fewer bytes gain
    nothing; None where no ceilings are known."""

    layer: tuple[int, int]
    rows: tuple[int, ...]
    gains: tuple[BatchGain, ...]
    bound: float | None


@dataclass(frozen=True)
class ServingAnswer:
    """All that was found, of which the view makes sentences. `layers` are arms with one layer low, the worst first, and
    `spared` that with all of them low and that with all but the worst; `experts` are those of a layer that a step reads
    in the mean."""

    question: ServingQuestion
    device: str
    times: tuple[ArmTimes, ...]
    prompt: int
    quality: Quality | None
    layers: tuple[tuple[ServedArm, ArmQuality], ...] = ()
    bandwidth: float | None = None
    runs: tuple[str, ...] = ()
    sweep: BatchSweep | None = None
    finished: bool = True
    spared: tuple[tuple[ServedArm, ArmQuality], ...] = ()
    experts: float | None = None

    def moved(self, arm: ServedArm) -> StepBytes:
        asked = self.question
        return step_bytes(served_shape(asked.size), arm, asked.batch, asked.contexts[-1], self.experts)

    def quality_of(self, arm: ServedArm) -> ArmQuality | None:
        """Of the reference, the floor."""
        if self.quality is None:
            return None
        return (self.quality.floor, *self.quality.arms)[self.question.arms.index(arm)]


def kept_answers(store: Path) -> Log[ServingAnswer]:
    return Log(store / "inference.jsonl", {"inference": ServingAnswer}, "answer of infer", 1, "Choose another --store.")
