"""The promises of a user's callable; and how a native cast or product differs from its emulation."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from fp8bench.model.planned import Support


class AuditKind(StrEnum):
    """The kind of a callable. A PRODUCT takes matrices a (M, K) and b (N, K) and returns a times b transposed; a LINEAR
    takes inputs (M, K) and a weight (N, K), and has gradients; an ATTENTION takes queries, keys and values (batch, N
    heads, M places, K); a MODEL is returned by a function without arguments, with or without a batch.
    """

    PRODUCT = "product"
    LINEAR = "linear"
    ATTENTION = "attention"
    MODEL = "model"


class Takes(StrEnum):
    """The operands of a product: tensors that it casts itself, or codes with the scales that decode them."""

    VALUES = "values"
    CODES = "codes"


# The meaning of each field of a signature, for `fp8bench audit --help` and help(fp8bench.audited).
SIGNATURE_WORDS = {
    "kind": (
        "product: f(a, b) returns a @ b.T; linear: x times a weight, with gradients; attention: of queries, keys "
        "and values; model: a function that returns a converted model; default taken from @fp8bench.audited"
    ),
    "precision": "the precision it promises, as in suite --dtypes: fp8, mxfp8, ...; row-wise scales of amax / 448 are "
    "fp8-rowwise:scale=exact, and powers of two fp8-rowwise",
    "takes": "inputs of a product: values, or codes with the scales that decode them; default values",
    "second": "layout of a product's second operand: (N, K) or (K, N); default nk",
    "multiple": "the callable may refuse sizes that are not multiples of N; default 1",
    "causal": "attention in which no token sees a later one",
}


@dataclass(frozen=True)
class Signature:
    """The promises of a callable: its kind, the precision whose casts it has, options included, and SIGNATURE_WORDS."""

    kind: AuditKind
    precision: str
    takes: Takes = Takes.VALUES
    second: str = "nk"
    multiple: int = 1
    causal: bool = False


class Difference(StrEnum):
    """The explanation of all elements that differ; NONE: no element differs."""

    NONE = "none"
    ORDER = "order"
    UNITS = "units"
    SHORT_SUMS = "short-sums"
    ROUNDING = "rounding"
    OVERFLOW = "overflow"
    LAYOUT = "layout"
    SCALE = "scale"
    ACCUMULATION = "accumulation"
    UNEXPLAINED = "unexplained"

    @property
    def conforms(self) -> bool:
        """Whether both do the same: definitions of products leave the order of summing open, and a device that sums as
        its units are known to sum, or as short as units may where nobody knows them, does what it should."""
        return self in (Difference.NONE, Difference.ORDER, Difference.UNITS, Difference.SHORT_SUMS)


@dataclass(frozen=True)
class FirstElement:
    """The first element that differs, and its value on each side."""

    place: tuple[int, ...]
    native: float
    emulated: float


@dataclass(frozen=True)
class Conformity:
    """One cast or product of one mode: `shape` is MxK of a cast, MxNxK of a product.

    `count` of `total` elements differ, by at most `largest` steps of the result's format. `difference` is None where
    the device does not do it; `why` has the reason, or describes the difference.
    """

    mode: str
    what: str
    shape: str
    difference: Difference | None = None
    why: str = ""
    count: int = 0
    total: int = 0
    largest: float = 0.0
    first: FirstElement | None = None


@dataclass(frozen=True)
class ModeConformity:
    """All casts and products of one mode; `support` is how the device does it."""

    mode: str
    support: Support
    found: tuple[Conformity, ...]

    @property
    def is_compared(self) -> bool:
        return any(conformity.difference is not None for conformity in self.found)

    @property
    def conforms(self) -> bool:
        return all(conformity.difference is None or conformity.difference.conforms for conformity in self.found)
