"""A model of a few thousand weights, and few windows to validate on."""

from collections.abc import Iterator
from dataclasses import replace

import pytest

from fp8bench.features.train.lab import evaluate
from fp8bench.nn.sizes import SIZES, GPTConfig
from tests.features.train.lab.labs import TINY, TINY_TIED
from tests.features.train.lab.plants import LOOKED_AT


@pytest.fixture(scope="module", autouse=True)
def _tiny() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(SIZES, TINY, GPTConfig(256, 32, 1, 2, 2, 64, batch=2, sequence=16))
        patch.setitem(SIZES, TINY_TIED, replace(SIZES[TINY], tied=True))
        patch.setattr(evaluate, "_VALIDATED_TOKENS", LOOKED_AT)
        yield
