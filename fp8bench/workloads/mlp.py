"""A dense feed-forward block, as transformers have one in every layer: two products and what lies between them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from fp8bench.axes import Axis, one_of, whole_number
from fp8bench.model import DeviceFacts, Level, Scalar, Support, TensorStatistics, Work
from fp8bench.protocols import Grid, Phases, Precision, Setup, Workload
from fp8bench.registry import workloads

if TYPE_CHECKING:
    import torch

    from fp8bench.nn.exercise import Exercise
    from fp8bench.nn.linear import Choose

LARGEST = 1 << 18


@workloads.register("mlp")
class Mlp(Workload):
    """Up, activation, down; gated, the product up has twice the columns and the activation is Llama's."""

    name = "mlp"
    summary = "a dense feed-forward block, plain (GELU) and gated (SiLU), forward or forward and backward"
    layer_kinds = ("up", "down")
    batch_axis = "tokens"
    history = Grid(
        cpu={"width": ("256",), "gated": ("yes",)},
        gpu={"width": ("4096",), "gated": ("yes",)},
        phases=("cast", "gemm", "elementwise"), errors=("output_error", "gradient_error"), per="flops",
    )  # fmt: skip

    def axes(self, facts: DeviceFacts) -> tuple[Axis, ...]:
        tokens, width, hidden = ("4096", "4096", "14336") if facts.accelerated else ("256", "256", "1024")
        return (
            Axis("tokens", "rows of the input", (tokens,), whole_number(high=LARGEST)),
            Axis("width", "features of input and output", (width,), whole_number(high=LARGEST)),
            Axis("hidden", "features between the two products", (hidden,), whole_number(high=LARGEST)),
            Axis("gated", "whether a second product up gates the first", ("no", "yes"), one_of("no", "yes")),
            Axis("pass", "forward alone, or training: forward and backward", ("training",),
                 one_of("forward", "training")),
        )  # fmt: skip

    def work(self, params: Mapping[str, Scalar]) -> Work:
        tokens, width, hidden = (int(params[name]) for name in ("tokens", "width", "hidden"))
        weights = width * hidden * (3 if _gated(params) else 2)
        # fp32 weights; input, output and what lies between in two bytes, the least of any carrier.
        least = 4.0 * weights + 2.0 * tokens * (2 * width + hidden)
        return Work(2.0 * tokens * weights * (3 if _training(params) else 1), tokens, least_memory=least)

    def support(self, params: Mapping[str, Scalar], precision: Precision, facts: DeviceFacts) -> Support:
        support = precision.support(facts)
        along_k, along_n = precision.multiples
        tokens, width, hidden = (int(params[name]) for name in ("tokens", "width", "hidden"))
        features_fit = not (width % along_k or hidden % along_k or width % along_n or hidden % along_n)
        tokens_fit = not (_training(params) and tokens % along_k)
        if support.level is not Level.NATIVE or (features_fit and tokens_fit):
            return support
        return Support(
            Level.REFUSED,
            f"native {precision.name} contracts in multiples of {along_k} and gives columns in multiples of {along_n}, "
            f"and weight gradients contract over the tokens; here tokens={tokens}, width={width}, hidden={hidden}: "
            "choose other sizes",
        )

    def prepare(self, setup: Setup) -> Exercise:
        return _exercise(setup, self.arithmetics(setup), setup.arithmetic.carrier)

    def step(self, state: Exercise, phase: Phases) -> None:
        state.step(phase)

    def error(self, setup: Setup) -> dict[str, float]:
        """Output, and in training all gradients, against the same in fp64 throughout."""
        import torch

        from fp8bench.nn.arithmetics import PlainArithmetic

        exact = PlainArithmetic(torch.float64)
        return self.prepare(setup).errors(_exercise(setup, lambda name: exact, exact.carrier), setup.settles)

    def statistics(self, setup: Setup) -> tuple[TensorStatistics, ...]:
        """Of the operands of both layers' products."""
        from fp8bench.nn.watching import WatchingArithmetic
        from fp8bench.numerics.ranges import Ledger

        ledger, own = Ledger(), self.arithmetics(setup)
        state = _exercise(setup, lambda name: WatchingArithmetic(own(name), name, ledger), setup.arithmetic.carrier)
        ledger.tallies.clear()  # preparing ran forward once
        state.outcome()
        return ledger.statistics()


def _gated(params: Mapping[str, Scalar]) -> bool:
    return params["gated"] == "yes"


def _training(params: Mapping[str, Scalar]) -> bool:
    return params["pass"] == "training"


def _exercise(setup: Setup, choose: Choose, carrier: torch.dtype) -> Exercise:
    """The block on random tokens in the carrier's dtype."""
    from fp8bench.nn.exercise import exercise
    from fp8bench.nn.gpt import FeedForward

    params = dict(setup.case.params)
    tokens, width, hidden = (int(params[name]) for name in ("tokens", "width", "hidden"))
    gated = _gated(params)
    return exercise(
        setup, lambda: FeedForward(width, hidden, gated, 1.0, choose), [(tokens, width)], carrier, _training(params)
    )
