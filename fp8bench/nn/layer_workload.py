"""What workloads share that exercise one layer apart from any model. No torch here: plans read it."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from fp8bench.model import Scalar, TensorStatistics
from fp8bench.nn.drawn_values import why_no_errors
from fp8bench.protocols import Phases, Precision, Setup, Workload
from fp8bench.protocols.axes import Axis, one_of

if TYPE_CHECKING:
    import torch

    from fp8bench.nn.exercise import Exercise
    from fp8bench.nn.linear import Choose
    from fp8bench.numerics.ranges import Ledger

PASS = Axis(
    "pass", "forward alone, or training: forward and backward", ("training",), one_of("forward", "training")
)  # fmt: skip


def is_training(params: Mapping[str, Scalar]) -> bool:
    return params["pass"] == "training"


def misfit(precision: Precision, rows: int, features: Sequence[int], training: bool, shown: str) -> str:
    """Why a layer's products do not fit a native precision; '' if they do. `shown` are its sizes in words."""
    along_k, along_n = precision.multiples
    features_fit = not any(size % along for size in features for along in (along_k, along_n))
    if features_fit and not (training and rows % along_k):
        return ""
    return (
        f"native {precision.name} contracts in multiples of {along_k} and gives columns in multiples of {along_n}, and "
        f"weight gradients contract over the tokens; here {shown}: choose other sizes"
    )


class LayerWorkload(Workload):
    """One layer on random inputs, forward alone or forward and backward."""

    @abstractmethod
    def exercise(self, setup: Setup, choose: Choose, carrier: torch.dtype) -> Exercise:
        """The layer with its inputs in the carrier's dtype; `choose` gives its products their arithmetic."""

    def prepare(self, setup: Setup) -> Exercise:
        return self.exercise(setup, self.arithmetics(setup), setup.arithmetic.carrier)

    def step(self, state: Exercise, phase: Phases) -> None:
        state.step(phase)

    def error_refused(self, params: Mapping[str, Scalar]) -> str:
        return why_no_errors(params)

    def error(self, setup: Setup) -> dict[str, float]:
        """Output, and in training all gradients, against the same in fp64 throughout."""
        import torch

        from fp8bench.nn.arithmetics import PlainArithmetic

        exact = PlainArithmetic(torch.float64)
        return self.prepare(setup).errors(self.exercise(setup, lambda name: exact, exact.carrier), setup.settles)

    def statistics(self, setup: Setup) -> tuple[TensorStatistics, ...]:
        """Of the operands of its products, in one pass."""
        from fp8bench.numerics.ranges import Ledger

        ledger = Ledger()
        state = self.exercise(setup, self.counted(setup, ledger), setup.arithmetic.carrier)
        ledger.tallies.clear()  # preparing ran forward once
        state.outcome()
        return ledger.statistics()

    def counted(self, setup: Setup, ledger: Ledger) -> Choose:
        """The layers' arithmetics, which enter into a ledger what they cast."""
        from fp8bench.nn.arithmetics import counted

        own = self.arithmetics(setup)
        return lambda name: counted(own(name), name, ledger)
