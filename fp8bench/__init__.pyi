"""The types of fp8bench's calls, made of its options by tests/house/test_python_signatures.py."""

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Literal

import torch

from fp8bench.api import findings as findings
from fp8bench.api import load as load
from fp8bench.api import resume as resume
from fp8bench.api import Run as Run
from fp8bench.api import table as table
from fp8bench.cli.outputs import CommandResult as CommandResult
from fp8bench.errors import Fp8benchError as Fp8benchError
from fp8bench.features.audit.model import audit_model as audit_model
from fp8bench.features.train.api import compare_streams as compare_streams
from fp8bench.features.train.api import hugging_face_callback as hugging_face_callback
from fp8bench.features.train.api import lightning_callback as lightning_callback
from fp8bench.features.train.api import load_training as load_training
from fp8bench.features.train.api import resume_training as resume_training
from fp8bench.features.train.api import TrainingResult
from fp8bench.features.train.api import watch as watch
from fp8bench.features.train.lab.step_optimizer import HighAccumulation as HighAccumulation
from fp8bench.features.train.values import TrainingObserver
from fp8bench.model.measured import Record as Record
from fp8bench.model.planned import Case as Case
from fp8bench.model.run import Finding as Finding
from fp8bench.model.words import Label as Label
from fp8bench.model.words import Phase as Phase
from fp8bench.model.words import Verdict as Verdict
from fp8bench.protocols import Observer
from fp8bench.user_code.named import audited as audited

__version__: str

def ablate(
    target: str, *, options: str | Iterable[str], reference: str | None = None, set: Mapping[str, object] = ...,
    quick: bool = False, budget: float | None = None, rounds: int | None = None, device: str | None = None,
    data: str | None = None, imports: str | Iterable[str] = ..., seed: int = 0, threads: int = 1,
    case_timeout: float | None = None, isolation: bool = True, store: str | Path = ".fp8bench",
    progress: bool = True
) -> CommandResult: ...
def advise(
    run: str, *, training: str | None = None, least: float = 10.0, store: str | Path = ".fp8bench",
    imports: str | Iterable[str] = ..., progress: bool = True
) -> CommandResult: ...
def audit(
    target: str, *, kind: Literal["product", "linear", "attention", "model"] | None = None,
    precision: str | None = None, takes: Literal["values", "codes"] = "values", second: Literal["nk", "kn"] = "nk",
    multiple: int = 1, causal: bool = False, device: str | None = None, seed: int = 0, threads: int = 1,
    store: str | Path = ".fp8bench", progress: bool = True
) -> CommandResult: ...
def compare(
    before: str, after: str, *, store: str | Path = ".fp8bench", progress: bool = True
) -> CommandResult: ...
def duel(
    suite: str, *, python_a: str | None = None, python_b: str | None = None, against: str | None = None,
    against_self: str | None = None, dtypes: str | Iterable[str] = ..., devices: str | Iterable[str] = ...,
    set: Mapping[str, object] = ..., data: str | None = None, imports: str | Iterable[str] = ...,
    sessions: int | None = None, quick: bool = False, budget: float | None = None, rounds: int | None = None,
    seed: int = 0, threads: int = 1, case_timeout: float | None = None, store: str | Path = ".fp8bench",
    progress: bool = True
) -> CommandResult: ...
def gate(
    *sides: str, duel: str | None = None, against: str | None = None, config: str | Path | None = None,
    history: bool = False, store: str | Path = ".fp8bench", imports: str | Iterable[str] = ...,
    thresholds: str | Path | None = None, rerun: bool = True, junit: str | Path | None = None,
    comment: str | Path | None = None, progress: bool = True
) -> CommandResult: ...
def profile(
    model: str | torch.nn.Module, batch: object = None, *, loss: Callable[..., torch.Tensor] | None = None,
    dtypes: str | Iterable[str] = ..., skip: str | Iterable[str] = ...,
    precision_map: Mapping[str, str] | None = None, forward: bool = False, optimizer: str = "adamw",
    compile: bool = False, reference: str | None = None, isolation: bool = True, report: bool = True,
    log: str | Iterable[str] = ..., store: str | Path = ".fp8bench", progress: bool = True,
    observer: Observer | None = None, devices: str | Iterable[str] = ..., quick: bool = False, brisk: bool = False,
    budget: float | None = None, rounds: int | None = None, seed: int = 0, threads: int = 1,
    imports: str | Iterable[str] = ..., case_timeout: float | None = None, trace: str | Path | None = None,
    energy: bool = True, energy_of: Literal["step", "phases"] = "step", max_batch: int | str | None = None,
    backend: str = "auto", sustained: float | None = None, tape: bool = False, shares: bool = False,
    counters: bool = False, ranks: int | None = None
) -> Run: ...
def run(
    suite: str, *, sessions: int | str = 1, report: bool = True, log: str | Iterable[str] = ...,
    store: str | Path = ".fp8bench", progress: bool = True, observer: Observer | None = None,
    dtypes: str | Iterable[str] = ..., devices: str | Iterable[str] = ..., reference: str | None = None,
    set: Mapping[str, object] = ..., precision_map: Mapping[str, str] = ..., data: str | None = None,
    quick: bool = False, brisk: bool = False, budget: float | None = None, rounds: int | None = None, seed: int = 0,
    threads: int = 1, imports: str | Iterable[str] = ..., isolation: bool = True, case_timeout: float | None = None,
    grid: bool = False, trace: str | Path | None = None, static_scales: int | None = None,
    refresh_scales: int | None = None, saturation_bound: float | None = None, energy: bool = True,
    energy_of: Literal["step", "phases"] = "step", max_batch: int | str | None = None, backend: str = "auto",
    sustained: float | None = None, tape: bool = False, shares: bool = False, counters: bool = False,
    ranks: int | None = None, scales_from: str | None = None
) -> Run: ...
def sensitivity(
    target: str | None = None, *, size: str | None = None, dtype: str = "fp8", reference: str | None = None,
    by: Literal["layer", "kind", "format"] = "layer", steps: int = 50, tolerance: float = 1.0,
    gradient_tolerance: float | None = None, seed: int = 0, threads: int = 1, device: str | None = None,
    data: str | None = None, imports: str | Iterable[str] = ..., case_timeout: float | None = None,
    isolation: bool = True, store: str | Path = ".fp8bench", write_map: str | Path | None = None,
    progress: bool = True
) -> CommandResult: ...
def suite(
    suite: str, *, sessions: int | str = 1, report: bool = True, log: str | Iterable[str] = ...,
    store: str | Path = ".fp8bench", progress: bool = True, observer: Observer | None = None,
    dtypes: str | Iterable[str] = ..., devices: str | Iterable[str] = ..., reference: str | None = None,
    set: Mapping[str, object] = ..., precision_map: Mapping[str, str] = ..., data: str | None = None,
    quick: bool = False, brisk: bool = False, budget: float | None = None, rounds: int | None = None, seed: int = 0,
    threads: int = 1, imports: str | Iterable[str] = ..., isolation: bool = True, case_timeout: float | None = None,
    grid: bool = False, trace: str | Path | None = None, static_scales: int | None = None,
    refresh_scales: int | None = None, saturation_bound: float | None = None, energy: bool = True,
    energy_of: Literal["step", "phases"] = "step", max_batch: int | str | None = None, backend: str = "auto",
    sustained: float | None = None, tape: bool = False, shares: bool = False, counters: bool = False,
    ranks: int | None = None, scales_from: str | None = None
) -> Run: ...
def train(
    *, dtypes: str | Iterable[str] = ..., steps: int | None = None, seeds: int | None = None, quick: bool = False,
    margin: float = 1.0, precision_map: Mapping[str, str] | None = None, rates: Mapping[str, float] | None = None,
    log: str | Iterable[str] = ..., live: str | Path | None = None, on_alarm: str = "",
    store: str | Path = ".fp8bench", progress: bool = True, observer: TrainingObserver | None = None,
    make: str | Callable[[], object] = "", skip: str | Iterable[str] = ..., reference: str | None = None,
    seed: int = 0, bands: str | Iterable[str] = ..., sweep: Mapping[str, object] = ..., device: str | None = None,
    threads: int = 1, data: str | None = None, stride: int = 10, evaluate: int = 50, keep: int = 50,
    energy: bool = True, scales_from: str | None = None, own_batch: int | str | None = None,
    imports: str | Iterable[str] = ..., isolation: bool = True, ranks: int | None = None, model: str = "nano",
    arch: Literal["gpt", "mlp", "cnn", "moe"] = "gpt", batch: int = 0, sequence: int = 0, micro_batches: int = 1,
    rate: float = 0.001, optimizer: str = "adamw", updates: Literal["fp32", "bf16", "fp8"] = "fp32",
    schedule: str = "cosine", clip: float | str = 1.0, start: str = "", tasks: str | Iterable[str] = ...,
    metric: str | Iterable[str] = ..., dropout: float = 0.0, loss_scale: str = "auto",
    optimizer_states: Literal["fp32", "bf16", "fp8lm"] = "fp32",
    master: Literal["fp32", "fp16-scaled", "fp16-fp8", "bf16-stochastic"] = "fp32",
    gradients: Literal["fp32", "bf16", "fp8"] = "fp32", checkpointing: Literal["no", "blocks"] = "no",
    compile: Literal["no", "yes"] = "no", attention: Literal["auto", "rounded", "prescaled"] = "auto",
    on_nan: Literal["stop", "skip", "lower-rate"] = "stop", refresh_scales: int | None = None,
    saturation_bound: float | None = None, then: str = "",
    parallel: Literal["", "ddp", "zero", "fsdp", "tp", "sp"] = "", wire: Literal["fp32", "bf16", "fp8"] = "fp32"
) -> TrainingResult: ...
