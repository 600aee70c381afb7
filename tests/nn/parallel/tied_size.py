"""A small size with a tied head, and a pipeline that forgets to add up the gradients of its two copies."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from fp8bench.nn.parallel.ways import WAYS, ModelPartSetup
from fp8bench.nn.sizes import SIZES

if TYPE_CHECKING:
    from fp8bench.nn.parallel.division import RankModelPart

SIZES["tied"] = replace(SIZES["nano"], tied=True)


def _forgetting(job: ModelPartSetup) -> RankModelPart:
    from fp8bench.nn.parallel.pipeline import OneForwardOneBackward

    model = OneForwardOneBackward(job)
    model.module.has_tied_weight = False
    return model


WAYS["pp_forgets_tie"] = replace(WAYS["pp_1f1b"], name="pp_forgets_tie", make_division=_forgetting)
