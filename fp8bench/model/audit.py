"""What is audited, and what an audit has found."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple


class AuditKind(StrEnum):
    """What a callable is.

    A PRODUCT takes matrices a (M, K) and b (N, K) and gives a times b transposed; a CAST takes a matrix and gives its
    values in low precision, or codes and scales; a LINEAR takes inputs (M, K) and a weight (N, K), and has gradients;
    an ATTENTION takes queries, keys and values (batch, N heads, M places, K); an OPTIMIZER is made of a list of
    parameters, as torch's are, and has `step()` and `param_groups`; a MODEL is what a function without arguments makes,
    with a batch or without.
    """

    PRODUCT = "product"
    CAST = "cast"
    LINEAR = "linear"
    ATTENTION = "attention"
    OPTIMIZER = "optimizer"
    MODEL = "model"


class Takes(StrEnum):
    """What a product is given: tensors to be cast by it, or codes with the scales that decode them."""

    VALUES = "values"
    CODES = "codes"


class UpdateRule(StrEnum):
    """What an optimizer does with a gradient: decay is decoupled in ADAMW, and added to the gradient in the others."""

    ADAMW = "adamw"
    ADAM = "adam"
    SGD = "sgd"


class KeptWeights(StrEnum):
    """What is left of the weights from one step to the next.

    STOCHASTIC ones are bfloat16, rounded at random; a MASTER is a float32 copy that the optimizer keeps of bfloat16
    parameters; SCALED ones are float16 under one scale a tensor, in parameters that are float32.
    """

    FP32 = "fp32"
    BF16 = "bf16"
    STOCHASTIC = "bf16-stochastic"
    MASTER = "bf16-master"
    SCALED = "fp16-scaled"


class FlatMoments(NamedTuple):
    """Moments as 8-bit optimizers keep them: codes under a scale for each run of `block` elements of the tensor."""

    codes: str
    block: int

    @classmethod
    def of(cls, word: str) -> FlatMoments | None:
        """'dynamic8-256', 'linear8-256', 'e4m3-256'; None for another word."""
        found = re.fullmatch(r"(e4m3|e5m2|dynamic8|dynamic4|linear8)-(\d{2,4})", word)
        return cls(found[1], int(found[2])) if found else None


class AuditOutcome(StrEnum):
    """What a check says. CANNOT TELL: what it needs could not be had."""

    PASS = "PASS"
    FAIL = "FAIL"
    CANNOT_TELL = "CANNOT TELL"


@dataclass(frozen=True)
class Signature:
    """What a callable promises: its kind, and the precision whose casts it has, options included.

    `second` is how a product's second operand lies: 'nk' is (N, K), 'kn' is (K, N). Sizes that are no multiples of
    `multiple` it may refuse. In `causal` attention no place sees a later one. An optimizer's precision is that of its
    first moment (or FlatMoments), and '' its `second_moment` is what goes with that. `baseline` names the callable
    whose time it is compared with.
    """

    kind: AuditKind
    precision: str
    takes: Takes = Takes.VALUES
    second: str = "nk"
    multiple: int = 1
    causal: bool = False
    rule: UpdateRule = UpdateRule.ADAMW
    second_moment: str = ""
    weights: KeptWeights = KeptWeights.FP32
    baseline: str = ""


@dataclass(frozen=True)
class AuditFinding:
    """What one check found: `code` is a reason, '' where there is nothing to say; one of a PASS is a remark.

    `input` is the smallest input that showed it. `error` is how far results are from the exact product of what went
    in, `expected` how far the emulation is; None where that says nothing.
    """

    check: str
    outcome: AuditOutcome
    code: str = ""
    why: str = ""
    input: str = ""
    error: float | None = None
    expected: float | None = None


@dataclass(frozen=True)
class AuditedLayer:
    """A layer of a model that was converted: `what` it is now, whether that promises `low` precision, what its product
    `runs` as ('' where it was not looked at), the FLOPs of its forward products, and, of one that was left as it was,
    the likely `reason` with a word for it (`rule`). `also` are its other paths."""

    name: str
    what: str
    weight: tuple[int, ...]
    low: bool
    runs: str = ""
    flops: int = 0
    reason: str = ""
    rule: str = ""
    also: tuple[str, ...] = ()


@dataclass(frozen=True)
class CallWork:
    """What torch sees of a call: memory that it takes, in pieces and bytes; casts, copies in a dtype, and products."""

    allocations: int = 0
    bytes: int = 0
    casts: int = 0
    copies: int = 0
    products: int = 0


CONTROL = "normal, again"
"""The name of what is timed twice."""


def spread_of(times: Mapping[str, float]) -> float:
    """How much longer the slowest kind of data takes than the fastest, from seconds by name."""
    kinds = [seconds for name, seconds in times.items() if name != CONTROL]
    return max(kinds) / min(kinds) - 1


def noise_of(times: Mapping[str, float]) -> float:
    """How much two turns on the same data differ."""
    pair = times[CONTROL], times[CONTROL.partition(",")[0]]
    return max(pair) / min(pair) - 1


@dataclass(frozen=True)
class Audit:
    """All of one callable on one device. `tried` is how many results were looked at; `layers` are a model's.

    `times` are seconds of the same call on data of each kind, of a processor those that it works; `work` is that of a
    call of the kernel, and of the baseline if there is one, with the seconds of both.
    """

    target: str
    signature: Signature
    findings: tuple[AuditFinding, ...]
    tried: int = 0
    seconds: float = 0.0
    layers: tuple[AuditedLayer, ...] = ()
    times: tuple[tuple[str, float], ...] = ()
    work: tuple[tuple[str, CallWork, float | None], ...] = ()

    @property
    def spread(self) -> float | None:
        """How much longer a call takes on the slowest kind of data than on the fastest; None where nobody looked."""
        return spread_of(dict(self.times)) if self.times else None

    @property
    def noise(self) -> float | None:
        """The same between two turns on the same data."""
        return noise_of(dict(self.times)) if self.times else None

    @property
    def low_flops(self) -> int:
        """Of the products of layers that promise low precision."""
        return sum(one.flops for one in self.layers if one.low)

    @property
    def outcome(self) -> AuditOutcome:
        """FAIL if any check failed, CANNOT TELL if any could not."""
        outcomes = {one.outcome for one in self.findings}
        if AuditOutcome.FAIL in outcomes:
            return AuditOutcome.FAIL
        if AuditOutcome.CANNOT_TELL in outcomes or not outcomes:
            return AuditOutcome.CANNOT_TELL
        return AuditOutcome.PASS
