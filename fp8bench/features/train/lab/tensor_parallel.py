"""A training whose ranks have heads and hidden features of every block each, and read whole batches."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from fp8bench.features.train.lab.together import Together
from fp8bench.nn.gpt import GPT, LanguageModel
from fp8bench.nn.parallel.cuts import cut_of
from fp8bench.nn.parallel.exchanges import Group
from fp8bench.nn.parallel.tensor_parallel import cut_roles, scaled_together, share_blocks
from fp8bench.nn.sizes import GPTConfig
from fp8bench.protocols import Arithmetic, Phases, Role, SilentPhases


class TensorParallel(Together):
    """What lies between the parts of the blocks all ranks have and compute alike, bit for bit: a sum that one of them
    has not got shows there."""

    def __init__(self, group: Group, config: GPTConfig, own_amax: bool) -> None:
        super().__init__(group, own_amax)
        self._config, self._incomplete = config, False

    def scaled(self, layer: str, arithmetic: Arithmetic) -> Arithmetic:
        """By the largest magnitudes of all ranks where a tensor is cut; of the others every rank knows them."""
        cut = cut_of(f"{layer}.weight", self._config)
        roles = cut_roles(cut) if cut is not None else tuple(Role) if ".core." in layer else ()
        return scaled_together(arithmetic, roles, self._over_ranks) if roles and self.shares_scales else arithmetic

    def take(self, model: LanguageModel) -> None:
        """This rank's share of every block. That all shares are the whole model is looked at here, where each rank
        has that: later on nobody does."""
        assert isinstance(model, GPT)
        whole = self._bits(model)
        share_blocks(model, self._config, self._group)
        self._incomplete = not torch.equal(self._group.added(self._bits(model)), whole)

    def _bits(self, model: GPT) -> Tensor:
        """Of each parameter that is cut the sum of all its bits, as numbers."""
        cut = [one for name, one in model.named_parameters() if cut_of(name, self._config) is not None]
        return torch.stack([one.detach().contiguous().view(torch.int32).sum(dtype=torch.int64) for one in cut])

    def own(self, parameters: Mapping[str, nn.Parameter]) -> Mapping[str, nn.Parameter]:
        self._cut = torch.tensor([cut_of(name, self._config) is not None for name in parameters])
        return parameters

    @contextmanager
    def present(self, phase: Phases) -> Iterator[None]:
        self._group.phase = phase
        try:
            yield
        finally:
            self._group.phase = SilentPhases()

    def norms(self, own: Sequence[Tensor]) -> list[Tensor]:
        """Of what is cut, of all shares; what all ranks have counts once."""
        each = torch.stack(list(own))
        whole = self._group.added(each.to(torch.float64).square()).sqrt().to(torch.float32)
        return list(torch.where(self._cut.to(each.device).repeat(len(each) // len(self._cut)), whole, each))

    def common(self, parameters: Mapping[str, nn.Parameter]) -> list[nn.Parameter]:
        return [one for one, cut in zip(parameters.values(), self._cut.tolist(), strict=True) if not cut]

    def faults(self) -> tuple[str, ...]:
        return ("has a share of the model that does not make it whole with the others'",) if self._incomplete else ()
