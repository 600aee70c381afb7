"""The suite numerics: its tensors, its precisions, and that its figures are those of its casts."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest
import torch

from fp8bench.model import DeviceFacts, Level, Scalar
from fp8bench.nn.captured import capture_tensors
from fp8bench.nn.sizes import CAPTURED
from fp8bench.plan.corpus import Corpus
from fp8bench.protocols import Role, Setup
from fp8bench.registry import precisions
from fp8bench.workloads.numerics import SYNTHETIC_TENSORS, Numerics
from tests.counts import for_each
from tests.workloads.steps import CPU, H200, setup_of


def setup_for(
    precision: str, tensor: str = "gaussian", corpus: Corpus | None = None, seed: int = 0, **changes: Scalar
) -> Setup:
    given = {"tensor": tensor, "rows": 96, "columns": 160, "role": "auto", **changes}
    params = dict(Numerics().expand(given)[0])
    return setup_of("numerics", params, precision, seed, corpus.path if corpus else None)


def errors(
    precision: str, tensor: str = "gaussian", corpus: Corpus | None = None, **changes: Scalar
) -> dict[str, float]:
    return Numerics().error(setup_for(precision, tensor, corpus, **changes))


@for_each("name", [*SYNTHETIC_TENSORS, *CAPTURED])
def test_a_tensor_has_the_shape_and_role_of_its_case(name: str, corpus: Corpus) -> None:
    setup = setup_for("fp16", name, corpus)
    state = Numerics().prepare(setup)
    params = dict(setup.case.params)
    assert state.source.shape == (params["rows"], params["columns"]) and state.source.dtype == torch.float32
    assert Numerics().work(params).bytes == state.source.numel() * 4
    assert state.role == (CAPTURED[name].role if name in CAPTURED else SYNTHETIC_TENSORS[name])
    assert dict(setup_for("fp16", name, corpus, role="weight").case.params)["role"] == "weight"


def test_a_caught_tensor_is_the_last_of_its_training(corpus: Corpus) -> None:
    state = Numerics().prepare(setup_for("bf16", "head-weight", corpus))
    assert torch.equal(state.source, capture_tensors(corpus.path, 0)["head-weight"][-1])
    with pytest.raises(ValueError, match="needs a token file"):
        Numerics().prepare(setup_for("bf16", "head-weight"))


def test_figures_are_those_of_ml_dtypes_casts() -> None:
    x = Numerics().prepare(setup_for("bf16")).source.numpy()
    for precision, dtype in (("bf16", ml_dtypes.bfloat16), ("custom:scaling=none", ml_dtypes.float8_e4m3fn)):
        error = x.astype(dtype).astype(np.float64) - x.astype(np.float64)
        wanted = 10 * math.log10((x.astype(np.float64) ** 2).sum() / (error**2).sum())
        assert errors(precision)["sqnr_db"] == pytest.approx(wanted, rel=1e-9)


def test_finer_scales_keep_more_of_what_outliers_hide() -> None:
    modes = [f"custom:format=e2m1:scaling={one}" for one in ("tensor", "row", "1x128", "mx", "nvfp4")]
    blocks = [errors(mode, "outliers")["sqnr_block_median_db"] for mode in modes]
    assert blocks == sorted(blocks) and blocks[-1] - blocks[0] > 15
    lost = [errors(mode, "outliers")["underflow_percent"] for mode in modes]
    assert lost[0] > 90 and lost[-1] < 20
    gaussian = [errors(f"custom:scaling={one}")["sqnr_db"] for one in ("none", "tensor", "row", "1x128", "mx")]
    assert max(gaussian) - min(gaussian) < 0.5


def test_what_saturates_is_counted_before_the_clamp() -> None:
    """FLOOR saturates a block's largest, RCEIL nothing; without a scale all values beyond the grid saturate."""
    found = {
        one: errors(f"custom:scaling=mx:scale={one}")["saturation_percent"]
        for one in ("floor", "even", "ceil", "rceil")
    }
    assert found["floor"] > found["even"] > found["ceil"] == found["rceil"] == 0
    x = Numerics().prepare(setup_for("bf16", "outliers")).source
    found = errors("custom:format=e2m1:scaling=none", "outliers")
    assert found["saturation_percent"] == pytest.approx(100 * float((x.abs() > 6).double().mean()))


def test_a_delayed_scale_has_seen_the_steps_before(corpus: Corpus) -> None:
    """Its error is that of any scale of a tensor, unlike with a scale of 1."""
    delayed, current = (errors(mode, "mlp-gradient", corpus) for mode in ("fp8-delayed", "fp8"))
    assert delayed["sqnr_db"] == pytest.approx(current["sqnr_db"], abs=0.5) and delayed["underflow_percent"] < 1
    assert set(delayed) - set(current) == {"scale_drift_octaves", "scale_lag_octaves"}
    course = [float(one.abs().max()) for one in capture_tensors(corpus.path, 0)["mlp-gradient"]]
    lags = [math.log2(now / max(course[:step])) for step, now in enumerate(course) if step]
    assert delayed["scale_lag_octaves"] == pytest.approx(max(lags), abs=1e-5)
    recent = errors("fp8-delayed:algorithm=most_recent", "mlp-gradient", corpus)
    lags = [math.log2(now / before) for before, now in itertools.pairwise(course)]
    assert recent["scale_lag_octaves"] == pytest.approx(max(lags), abs=1e-5)


def test_gradients_of_fp16_arrive_with_its_loss_scale() -> None:
    scaled = setup_for("fp16", "log-normal")
    plain = setup_for("bf16", "log-normal")
    assert torch.equal(Numerics().prepare(scaled).source, Numerics().prepare(plain).source * 1024)
    assert Numerics().statistics(scaled) == Numerics().statistics(plain)
    assert (
        Numerics().statistics(plain)[0].kind == "log-normal" and Numerics().statistics(plain)[0].role == Role.GRADIENT
    )


def test_overflow_of_fp16_is_said() -> None:
    """torch's cast gives infinities: they fail no case, and are in no SQNR."""
    setup = setup_for("fp16", "log-normal", rows=512, columns=512, role="gradient")
    assert Numerics().error(setup)["not_finite_percent"] == 0
    found = Numerics().error(replace(setup, loss_scale=1e9))
    assert found["not_finite_percent"] > 0 and all(math.isfinite(value) for value in found.values())
    assert found["not_finite_percent"] <= found["saturation_percent"]


@for_each("facts", [CPU, H200])
def test_what_rounds_nothing_is_refused(facts: DeviceFacts) -> None:
    for precision, why in (("fp32", "nothing is rounded"), ("tf32", "nothing to round")):
        support = Numerics().support({}, precisions.get(precision), facts)
        assert support.level is Level.REFUSED and why in support.reason
    assert Numerics().support({}, precisions.get("fp8"), facts).level is not Level.REFUSED
