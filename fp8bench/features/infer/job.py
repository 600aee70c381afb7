"""Measures the quality of all arms in a separate worker. Then times decode steps at several contexts, and one prompt,
as runs of the suites `decode` and `prefill`.

An arm without a native kernel has bytes and quality but no times, because nobody would serve with an emulation.
"""

from __future__ import annotations

import math
import sys
import sysconfig
from array import array
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

from fp8bench.analysis.energy import energy_figures
from fp8bench.analysis.findings import findings
from fp8bench.analysis.samples import list_step_samples
from fp8bench.errors import StoreError, UsageError, WorkerFault, to_original_error
from fp8bench.features.infer.fits import FittedLine, fastest, find_context_crossing, fit_line
from fp8bench.features.infer.values import (
    ArmTimes,
    QualityTask,
    ServedModel,
    ServingAnswer,
    ServingQuality,
    ServingQuestion,
    arm_precision,
    is_record_of_arm,
    open_serving_answer_log,
)
from fp8bench.features.train.kind import find_training, load_training_header, newest_checkpoint
from fp8bench.features.train.lab.models import make_config
from fp8bench.features.train.values import TokenSpan
from fp8bench.files import open_file
from fp8bench.jobs.observer import JobObserver
from fp8bench.measure.handle import ProcessWorker, Worker, register_process_run
from fp8bench.model import Ceilings, DeviceFacts, Record, Request, Run
from fp8bench.model.measured import Ceiling, Limit
from fp8bench.model.raw import Settings
from fp8bench.nn.served import (
    OWN,
    USER_MODEL_SHAPES,
    ServedArm,
    ServedShape,
    check_served_support,
    check_weight_groups,
    estimate_min_memory,
    find_served_shape,
    step_bytes,
)
from fp8bench.nn.sizes import SERVED_SIZES
from fp8bench.pipeline import execute
from fp8bench.plan.make import find_device
from fp8bench.registry import precisions
from fp8bench.units import size

_WORKER_MODULE = "fp8bench.features.infer.quality"
SHIPPED, SHIPPED_WEIGHTS = "nano-python", Path(__file__).with_name("nano-python.bin")
# Modules of the standard library that the shipped model was not trained on (suites/inference_fixture.py of commit
# ecade0ae trained it). WINDOW_TOKENS is the number of positions of this model.
HELD_OUT_MODULES, WINDOW_TOKENS = ("argparse.py", "statistics.py", "textwrap.py"), 128
_WORKER_TIMEOUT_SECONDS = 1800.0
# The default contexts, without and with --quick.
_DEFAULT_CONTEXTS = {False: (256, 1024, 1025, 2048, 4096), True: (128, 512, 513, 1024, 2048)}


def answer_question(
    question: ServingQuestion,
    store: Path,
    command: str,
    observer: JobObserver,
    trained: ServedModel | None = None,
    reference: str | None = None,
) -> ServingAnswer:
    """Measures the quality of all arms, then their times, and stores a finished answer.

    Quality is measured on `trained` if given, else on the user's model or on the shipped model. `reference` is the
    precision that the arms are compared with, by default that in which models are usually served on the device. After
    an interrupt, the answer has what was measured until then, and is not stored.
    """
    # 1. Read the shape of a user's model, because memory estimates need it.
    settings = Settings(question.threads, question.seed)
    with register_process_run(True), ProcessWorker(settings, module=_WORKER_MODULE) as worker:
        facts = find_device(question.device, worker.probe())
        question = add_reference(question, facts, reference)
        model = trained or make_shipped_model(question.tokens)
        if question.is_user_model:
            USER_MODEL_SHAPES[question.size] = ServedShape(
                *_ask_worker(worker, "read_shape", question.size, facts, question.seed)
            )
            question, model = complete_serving_question(question), ServedModel(question.size)
        # 2. Measure the quality of all arms on the same tokens, before anything is timed.
        _check_memory_suffices(question, facts)
        quality_task = QualityTask(
            model, question.tokens, question.arms, facts, question.seed, len(question.arms) * question.rollout
        )
        with observer.counting() as report_progress:
            report_progress(0, 1, "models", "quality on the same tokens")
            quality: ServingQuality = _ask_worker(worker, "measure_quality", quality_task)
    # 3. Measure times with the suites `decode` and `prefill`. After an interrupt, keep the measurements.
    answer = ServingAnswer(question, facts.key, (), question.contexts[0], quality)
    try:
        answer = _measure_arm_times(answer, facts, store, command, observer)
    except KeyboardInterrupt:
        return replace(answer, finished=False)
    # 4. Do not store interrupted answers, because later comparisons assume that all arms were measured.
    if not answer.finished:
        return answer
    try:
        open_serving_answer_log(store).append([answer])
    except StoreError as error:
        observer.note(str(error))
    return answer


def _ask_worker(worker: Worker, name: str, *arguments: Any) -> Any:
    try:
        return getattr(cast(Any, worker.with_time_limit(_WORKER_TIMEOUT_SECONDS)), name)(*arguments)
    except WorkerFault as fault:
        raise to_original_error(fault) from None


def add_reference(question: ServingQuestion, facts: DeviceFacts, reference: str | None) -> ServingQuestion:
    """Puts the reference before the arms. Models are usually served in fp32 on a CPU, and in bf16 on a GPU."""
    reference_arm = ServedArm(reference or ("bf16" if facts.accelerated else "fp32"))
    return replace(question, arms=tuple(dict.fromkeys((reference_arm, *question.arms))))


def complete_serving_question(question: ServingQuestion) -> ServingQuestion:
    """Adds default contexts to a question that has none. Raises UsageError if a context exceeds the positions of the
    model, or if a format cannot divide the model's rows into groups of equal size.
    """
    shape, defaults = find_served_shape(question.size), _DEFAULT_CONTEXTS[question.quick]
    default_context_lengths = tuple(sorted({shape.sequence * eighths // 8 for eighths in (1, 2, 4, 8)}))
    contexts = question.contexts or (default_context_lengths if defaults[-1] > shape.sequence else defaults)
    if math.gcd(*contexts) > 1:  # add a context one token longer than a page, at which a paged cache is slower
        contexts = tuple(sorted({*contexts, contexts[len(contexts) // 2 - 1] + 1}))
    if contexts[0] < 1 or contexts[-1] > shape.sequence:
        raise UsageError(
            f"--contexts goes from {contexts[0]} to {contexts[-1]}: {question.size} has positions for 1 to "
            f"{shape.sequence}."
        )
    for arm in question.arms:
        check_weight_groups(shape, arm)
    return replace(question, contexts=contexts)


def _check_memory_suffices(question: ServingQuestion, facts: DeviceFacts) -> None:
    shape, context = find_served_shape(question.size), question.contexts[-1]
    # The largest possible number of bytes: a step may read all experts.
    reference_step_bytes = step_bytes(shape, question.arms[0], question.batch, context, shape.experts).total
    required_bytes = max(estimate_min_memory(shape, question.batch, context), reference_step_bytes)
    if facts.memory_bytes and required_bytes > facts.memory_bytes:
        raise UsageError(
            f"{question.size} with --batch {question.batch} at a context of {context} takes "
            f"{size(required_bytes)} or more, and {facts.key} has {size(facts.memory_bytes)}. Choose a smaller batch, "
            "context or model."
        )


def make_shipped_model(tokens: int) -> ServedModel:
    return ServedModel(SHIPPED, SERVED_SIZES[SHIPPED], str(SHIPPED_WEIGHTS), text=make_held_out_windows(tokens))


def make_held_out_windows(tokens: int) -> tuple[tuple[int, ...], ...]:
    """Returns windows of text from the modules that the shipped model was not trained on, as ASCII codes."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    text = "".join((folder / name).read_text(encoding="utf-8", errors="replace") for name in HELD_OUT_MODULES)
    return _cut_token_windows(text.encode("ascii", errors="replace"), WINDOW_TOKENS, tokens)


def _cut_token_windows(ids: Sequence[int], length: int, tokens: int) -> tuple[tuple[int, ...], ...]:
    """Cuts windows of `length` + 1 token ids out of a text. They are spread over the whole text, because its beginning
    is unusual: a module begins with imports.
    """
    # Cut at least two windows, because the interval of a single text is unbounded.
    window_count = min(max(2, tokens // length), (len(ids) - 1) // length)
    window_starts = [number * ((len(ids) - length - 1) // window_count) for number in range(window_count)]
    return tuple(tuple(ids[start : start + length + 1]) for start in window_starts)


def _measure_arm_times(
    answer: ServingAnswer, facts: DeviceFacts, store: Path, command: str, observer: JobObserver
) -> ServingAnswer:
    # 1. Choose the arms with a native kernel on this device. The reference must be one of them, because the times of
    # all other arms are compared with its times.
    question = answer.question
    params = {"size": question.size, "kv": OWN, "weights": OWN}
    support_by_arm = {
        arm: check_served_support(params, precisions.get(arm_precision(arm)), facts) for arm in question.arms
    }
    reference = support_by_arm[question.arms[0]]
    if not reference.is_native:
        raise UsageError(
            f"the reference has no native kernel on {facts.key}: {reference.reason}. Give --reference fp32 or bf16."
        )
    native_arms = [arm for arm in question.arms if support_by_arm[arm].is_native]

    def measure_suite(suite: str, *contexts: int) -> Run:
        dtypes = tuple(map(arm_precision, native_arms))
        axes = {"size": (question.size,), "batch": (str(question.batch),), "context": tuple(map(str, contexts))}
        request = Request(
            suite,
            dtypes,
            (facts.key,),
            dtypes[0],
            tuple(axes.items()),
            quick=question.quick,
            seed=question.seed,
            threads=question.threads,
        )
        with observer.measuring() as progress:
            return execute(request, store, progress, command, origin="infer")

    # 2. Time decoding at every context, then a prompt. After an interrupt during the prompt, the decode times are
    # kept.
    decode_suite_run = measure_suite("decode", *question.contexts)
    runs = [decode_suite_run]
    with suppress(KeyboardInterrupt):
        if decode_suite_run.finished:
            runs.append(measure_suite("prefill", answer.prompt))
    # 3. Fit a line to each arm's times, or store the reason why it has none.
    finished = len(runs) == 2 and runs[-1].finished
    measured_context_lengths = tuple(sorted({_read_context_length(record) for record in decode_suite_run.records}))
    if measured_context_lengths and not finished:
        question = replace(question, contexts=measured_context_lengths)
    arm_times = [
        replace(time, kernel=support_by_arm[time.arm].reason)
        for time in collect_arm_times(question, native_arms, decode_suite_run, runs[-1])
    ]
    arm_times += [ArmTimes(arm, why=support_by_arm[arm].reason) for arm in question.arms if arm not in native_arms]
    # 4. Add the measured copy rate, because it limits the speed of decoding.
    ceiling = next((record.ceiling for record in decode_suite_run.records if record.ceiling is not None), Ceiling())
    return replace(
        answer,
        question=question,
        times=tuple(arm_times),
        bandwidth=Ceilings(ceiling.rates).bound(Limit.COPY),
        runs=tuple(run.id for run in runs),
        experts=mean_experts_read(decode_suite_run, question),
        finished=finished,
    )


def mean_experts_read(decode: Run, question: ServingQuestion) -> float | None:
    """Returns how many experts each layer reads in a decode step of the reference at the longest context, on average
    over layers. Returns None if this is unknown.
    """
    for record in decode.records:
        experts_measurement = record.measurement("distinct_experts")
        if (
            record.is_reference
            and _read_context_length(record) == question.contexts[-1]
            and experts_measurement
            and experts_measurement.samples
        ):
            return experts_measurement.samples[0] / find_served_shape(question.size).layers
    return None


def _read_context_length(record: Record) -> int:
    return int(record.case.param("context"))


def collect_arm_times(
    question: ServingQuestion, native_arms: Sequence[ServedArm], decode: Run, prefill: Run
) -> Iterator[ArmTimes]:
    case_findings = findings(decode)
    reference: FittedLine | None = None
    # The reference comes first, because the other arms are compared with its fitted line.
    for arm in native_arms:
        # 1. Collect the arm's times at each context, why the first untimed context has none, and the labels that
        # prevent a verdict.
        records = sorted(
            (_read_context_length(record), record) for record in decode.records if is_record_of_arm(record, arm)
        )
        rounds, reason, doubts = {}, "", dict[str, None]()
        for context, record in records:
            doubts |= dict.fromkeys(label.value for label in case_findings[record.case.id].hard)
            if record.timing is not None:
                rounds[context] = list_step_samples(record.timing)
            else:
                reason = reason or f"at a context of {context}: {record.reason}"
        # 2. Fit a line only if all contexts were timed. Outside the timed contexts, a crossing of two lines would be a
        # guess.
        time_over_context_line = fit_line(rounds) if len(rounds) == len(question.contexts) else None
        context_crossing = None
        if arm is native_arms[0]:
            reference = time_over_context_line
        elif time_over_context_line is not None and reference is not None:
            context_crossing = find_context_crossing(time_over_context_line, reference, question.contexts)
        # 3. Add the time of the prompt. Without a run of `prefill`, `prefill` is the decode run, which has no such
        # record.
        prefill_records = [
            record for record in prefill.records if record.case.workload == "prefill" and is_record_of_arm(record, arm)
        ]
        prefill_record = prefill_records[0] if prefill_records else None
        yield ArmTimes(
            arm,
            tuple((context, fastest(samples)) for context, samples in rounds.items()),
            time_over_context_line.line if time_over_context_line else None,
            context_crossing,
            fastest(list_step_samples(prefill_record.timing)) if prefill_record and prefill_record.timing else None,
            reason,
            (_joules_per_token(prefill_record), _joules_per_token(records[-1][1] if records else None)),
            doubts=tuple(doubts),
        )


def _joules_per_token(record: Record | None) -> float | None:
    """Returns the joules of a step divided by the number of tokens in its batch."""
    if record is None or (figures := energy_figures(record)) is None:
        return None
    return figures.gross_energy.middle / record.work.tokens


# Model sizes whose names differ between training and serving: name in training -> name in serving.
_SERVED_SIZE_NAMES = {"gpt2-124m": "gpt2"}
_SIZE_WITH_EXPERTS = "nano-moe"


def find_trained_model(word: str, store: Path, tokens: int) -> tuple[ServedModel, str]:
    """Returns the checkpoint of a training, and the size of the model to time. `word` is the training's 'ID', which
    selects the weights of its reference, or 'ID:ARM'. Raises UsageError if the training has no checkpoint, or if its
    model has no cache of keys and values.
    """
    # 1. Find the training and its arm.
    training_name, _, arm_name = word.partition(":")
    path = find_training(training_name, store)
    training = load_training_header(path)
    arms = {arm.name: arm for arm in training.arms}
    arm_name = arm_name or training.arms[0].name
    subject = f"the training {training.id}"
    if arm_name not in arms:
        raise UsageError(f"{subject} has no arm {arm_name!r:.80}. It has {', '.join(arms)}.")
    settings = arms[arm_name].merge_settings(training.request.settings)
    # 2. Accept only unsharded fp32 weights of a model with a cache.
    problem = ""
    if settings.arch not in ("gpt", "moe"):
        problem = f"is of --arch {settings.arch}, which cannot be served with a cache: only gpt and moe can"
    elif settings.parallel not in ("", "ddp"):
        problem = f"is sharded by --parallel {settings.parallel}: each rank has a part of the model"
    elif settings.master != "fp32":
        problem = f"keeps its weights in --master {settings.master}: only fp32 can be read"
    if problem:
        raise UsageError(f"{subject} {problem}. Choose another training.")
    # 3. Find the newest checkpoint of the training, if it has any.
    checkpoint = newest_checkpoint(path)
    if checkpoint is None:
        steps, keep_interval = training.request.steps, training.request.keep
        raise UsageError(
            f"{subject} has no checkpoint: it was trained {steps} steps, with --keep {keep_interval}. Train it again, "
            f"for example with --keep {max(1, steps // 2)}."
        )
    folder, position = checkpoint
    # 4. Collect the folder of the weights, the model's config, and a text that the model was not trained on.
    description = f"{arm_name} of training {training.id}, step {position.step} of {training.request.steps}"
    config = make_config(settings, training.text.vocabulary)
    # All ranks of DDP have the same weights.
    folder = folder / "rank-0" if training.request.ranks else folder
    text = _cut_token_windows(_read_tokens(training.text.held_out), config.sequence, tokens)
    size = _SIZE_WITH_EXPERTS if config.experts else _SERVED_SIZE_NAMES.get(settings.model, settings.model)
    return ServedModel(description, config, str(folder), arm_name, text), size


def _read_tokens(span: TokenSpan) -> array[int]:
    ids = array("H")
    try:
        with open_file(Path(span.path), most=None) as file:
            file.seek(span.start * ids.itemsize)
            ids.frombytes(file.read((span.stop - span.start) * ids.itemsize))
    except (OSError, ValueError) as error:
        raise UsageError(f"the training's text {span.path} cannot be read ({error}). Restore it.") from None
    # The file has token ids in little-endian order.
    if sys.byteorder == "big":
        ids.byteswap()
    return ids
