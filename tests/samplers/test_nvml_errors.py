"""Every code that pynvml knows has words of ours."""

from __future__ import annotations

import pynvml

from fp8bench.samplers.nvml_errors import REASONS, reason


def test_every_code_has_words() -> None:
    codes = {value for name, value in vars(pynvml).items() if name.startswith("NVML_ERROR_")}
    assert len(codes) > 25
    assert codes == set(REASONS)
    assert len(set(REASONS.values())) == len(REASONS)


def test_a_code_of_the_future_is_named_by_its_number() -> None:
    assert reason(15) == "the GPU is lost: it fell off the bus or cannot be reached (NVML error 15)"
    assert reason(4711) == "an error that fp8bench does not know (NVML error 4711)"
