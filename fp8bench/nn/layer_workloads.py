"""Bases of workloads that run one layer. No torch here: plans read it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fp8bench.model import Scalars, TensorStatistics
from fp8bench.nn.shared_workloads import is_training, why_no_errors
from fp8bench.protocols import Arithmetic, Phases, Setup, Workload

if TYPE_CHECKING:
    import torch
    from torch import nn

    from fp8bench.nn.exercise import Exercise
    from fp8bench.nn.linear import Choose
    from fp8bench.numerics.ranges import Ledger


class LayerWorkload(Workload):
    """One layer on random inputs, forward alone or forward and backward.

    A subclass makes the layer (`layer`) and has the `shapes` of its inputs, or makes both (`exercise`).
    """

    def layer(self, params: Scalars, choose: Choose) -> nn.Module:
        """Makes the layer; `choose` gives each product its arithmetic by name."""
        raise NotImplementedError

    def shapes(self, params: Scalars) -> list[tuple[int, ...]]:
        raise NotImplementedError

    def exercise(self, setup: Setup, choose: Choose, carrier: torch.dtype) -> Exercise:
        """Makes the layer with inputs in the carrier's dtype."""
        from fp8bench.nn.exercise import exercise

        params = setup.params
        return exercise(setup, lambda: self.layer(params, choose), self.shapes(params), carrier, is_training(params))

    def prepare(self, setup: Setup) -> Exercise:
        state = self.exercise(setup, self.arithmetics(setup), setup.arithmetic.carrier)
        if around := setup.around(self.around(setup.params)):
            from fp8bench.nn.around import set_around

            set_around(state.layer, around)
        return state

    def step(self, state: Exercise, phase: Phases) -> None:
        state.step(phase)

    def error_refused(self, params: Scalars) -> str:
        return why_no_errors(params)

    def error(self, setup: Setup) -> dict[str, float]:
        return self.prepare(setup).errors(self.exact(setup), setup.settles)

    def exact(self, setup: Setup) -> Exercise:
        import torch

        from fp8bench.nn.arithmetics import PlainArithmetic

        return self.all_in(setup, PlainArithmetic(torch.float64))

    def all_in(self, setup: Setup, arithmetic: Arithmetic) -> Exercise:
        return self.exercise(setup, lambda name: arithmetic, arithmetic.carrier)

    def statistics(self, setup: Setup) -> tuple[TensorStatistics, ...]:
        from fp8bench.numerics.ranges import Ledger

        ledger = Ledger()
        state = self.exercise(setup, self.count_operands(setup, ledger), setup.arithmetic.carrier)
        ledger.tallies.clear()  # the tallies of the forward pass in preparing
        state.outcome()
        return ledger.statistics()

    def count_operands(self, setup: Setup, ledger: Ledger) -> Choose:
        from fp8bench.nn.arithmetics import count_casts

        choose = self.arithmetics(setup)
        return lambda name: count_casts(choose(name), name, ledger)


class ConvolvedWorkload(LayerWorkload):
    """A workload with convolutions: operands are counted by the kind of their layer."""

    def count_operands(self, setup: Setup, ledger: Ledger) -> Choose:
        """Counts only the source image of windows that are written out: each pixel once."""
        from fp8bench.nn.arithmetics import PlainArithmetic, count_casts

        choose = self.arithmetics(setup)
        kinds = {layer.name: layer.kind for layer in self.layers(setup.params)}

        def choose_counted_values(name: str) -> Arithmetic:
            inner = choose(name)
            return count_casts(PlainArithmetic(inner.carrier) if inner.explicit else inner, kinds[name], ledger)

        return choose_counted_values
