"""A run's figures in asv's view."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

from fp8bench.store.asv.files import load_results
from fp8bench.store.asv.rows import index_figures_by_params
from fp8bench.store.asv.view import asv_results_folder, update_view
from fp8bench.store.runs.run_file import load_run
from tests.counts import for_each
from tests.histories import keep, records, run_at
from tests.runs import error


@for_each("broken", [math.nan, math.inf])
def test_figures_that_are_not_finite_count_as_failed(tmp_path: Path, broken: float) -> None:
    """asv reads NaN as not measured. Its search for steps never ends at an infinite figure."""
    store = tmp_path / str(broken)
    lead, other = records()
    with_errors = (
        replace(lead, measurements=(error("product_error", 0.01),)),
        replace(other, measurements=(error("product_error", broken),)),
    )
    update_view(load_run(keep(store, run_at(0, records=with_errors))), store)
    (path,) = asv_results_folder(store).glob("*/*-existing-*.json")
    figures = index_figures_by_params(load_results(path).rows["gemm.Gemm.track_product_error"])
    assert [figures["'fp32'", "'512'"][0], figures["'bf16'", "'512'"][0]] == [0.01, None]
