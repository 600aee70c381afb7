"""The promises of a user's callable about its results, and how a native cast or product differs from its emulation."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from fp8bench.model.planned import Support


class AuditedCallableKind(StrEnum):
    """The kind of a user's callable.

    PRODUCT takes matrices a (M, K) and b (N, K) and returns a @ b.T. LINEAR takes inputs (M, K) and a weight (N, K),
    and has gradients. ATTENTION takes queries, keys and values (batch, N heads, M positions, K). MODEL is a function
    without arguments that returns a model, or a model and a batch.
    """

    PRODUCT = "product"
    LINEAR = "linear"
    ATTENTION = "attention"
    MODEL = "model"


class OperandForm(StrEnum):
    """The form in which a callable receives the operands of a product: values that it casts itself, or codes with their
    scales.
    """

    VALUES = "values"
    CODES = "codes"


# The meaning of each field of a signature, for `fp8bench audit --help` and help(fp8bench.audited).
SIGNATURE_WORDS = {
    "kind": (
        "product: f(a, b) returns a @ b.T; linear: f(x, weight), with gradients; attention: f(queries, keys, "
        "values); model: a function that returns a converted model; default taken from @fp8bench.audited"
    ),
    "precision": "the promised precision, as in suite --dtypes: fp8, mxfp8, ...; row-wise scales of amax / 448 are "
    "fp8-rowwise:scale=exact, and powers of two fp8-rowwise",
    "takes": "the inputs of a product: values, or codes with the scales that decode them; default values",
    "second": "the layout of a product's second operand: (N, K) or (K, N); default nk",
    "multiple": "the callable may refuse sizes that are not multiples of N; default 1",
    "causal": "attention in which no token sees a later one",
}


@dataclass(frozen=True)
class CallablePromise:
    """The promise of a user's callable about its inputs and results. SIGNATURE_WORDS explains each field."""

    kind: AuditedCallableKind
    precision: str
    takes: OperandForm = OperandForm.VALUES
    second: str = "nk"
    multiple: int = 1
    causal: bool = False


class Difference(StrEnum):
    """The reason that explains all elements in which a native result differs from its emulation. NONE means that no
    element differs.
    """

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
        """Whether the difference is allowed: a different order of summation, or the summation of the device's matrix
        units. If the summation of these units is unknown, sums may have as few bits as matrix units use.
        """
        return self in (Difference.NONE, Difference.ORDER, Difference.UNITS, Difference.SHORT_SUMS)


@dataclass(frozen=True)
class FirstDifferingElement:
    """The first element that differs between a native and an emulated result: its indices and both values."""

    place: tuple[int, ...]
    native: float
    emulated: float


@dataclass(frozen=True)
class Conformity:
    """How one native cast or product in a mode (a precision with its options) compares with its emulation. `shape` is
    MxK for a cast and MxNxK for a product.

    `count` of `total` elements differ, by at most `largest` steps of the result's format. `why` describes the
    difference. If the device cannot run the cast or product, `difference` is None and `why` is the reason.
    """

    mode: str
    what: str
    shape: str
    difference: Difference | None = None
    why: str = ""
    count: int = 0
    total: int = 0
    largest: float = 0.0
    first: FirstDifferingElement | None = None


@dataclass(frozen=True)
class ModeConformity:
    """How all native casts and products of one mode (a precision with its options) compare with their emulation.
    `support` is how the device supports the mode.
    """

    mode: str
    support: Support
    found: tuple[Conformity, ...]

    @property
    def is_compared(self) -> bool:
        return any(conformity.difference is not None for conformity in self.found)

    @property
    def conforms(self) -> bool:
        return all(conformity.difference is None or conformity.difference.conforms for conformity in self.found)
