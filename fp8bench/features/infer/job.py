"""Measures quality in a separate worker, then times decode over contexts, and a prompt, by the ordinary pipeline.

Arms without a native kernel have bytes and quality but no times: nobody would serve with an emulation.
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
from fp8bench.analysis.samples import step_samples
from fp8bench.errors import StoreError, UsageError, WorkerFault, as_usage
from fp8bench.features.infer.fits import LineDraws, copy_rate, crossing_of, fastest, line_of
from fp8bench.features.infer.values import (
    ArmTimes,
    Quality,
    QualityTask,
    ServedModel,
    ServingAnswer,
    ServingQuestion,
    dtype_of,
    is_of,
    kept_answers,
)
from fp8bench.features.train.kind import find_training, load_head, newest_checkpoint
from fp8bench.features.train.lab.models import config_of
from fp8bench.features.train.values import TokenSpan
from fp8bench.files import open_file
from fp8bench.jobs.observer import JobObserver
from fp8bench.measure.handle import ProcessWorker, Worker, claim_process
from fp8bench.model import DeviceFacts, Level, Record, Request, Run
from fp8bench.model.raw import Settings
from fp8bench.nn.served import (
    OWN,
    OWN_SHAPES,
    ServedArm,
    ServedShape,
    check_groups,
    served_memory,
    served_shape,
    served_support,
    step_bytes,
)
from fp8bench.nn.sizes import SERVED_SIZES
from fp8bench.pipeline import execute
from fp8bench.plan.make import device_named
from fp8bench.registry import precisions
from fp8bench.units import size

_MODULE = "fp8bench.features.infer.quality"
SHIPPED, WEIGHTS = "nano-python", Path(__file__).with_name("nano-python.bin")
# suites/inference_fixture.py of commit ecade0ae trained the shipped model. These are the modules left out of its
# training, and its number of positions.
HELD_OUT, WINDOW = ("argparse.py", "statistics.py", "textwrap.py"), 128
_LIMIT = 1800.0
# Default contexts, by whether --quick is given.
_CONTEXTS = {False: (256, 1024, 1025, 2048, 4096), True: (128, 512, 513, 1024, 2048)}


def answer_question(
    question: ServingQuestion, store: Path, command: str, observer: JobObserver, trained: ServedModel | None = None
) -> ServingAnswer:
    """Measures quality on `trained` if given, else on the maker's model or the shipped one, then times.

    After an interrupt, returns what was measured until then. A finished answer is also stored.
    """
    # 1. Get the shape of a user's model first: memory estimates need it.
    settings = Settings(question.threads, question.seed)
    with claim_process(True), ProcessWorker(settings, module=_MODULE) as worker:
        facts = device_named(question.device, worker.probe())
        model = trained or shipped_model(question.tokens)
        if question.is_own:
            OWN_SHAPES[question.size] = ServedShape(*_ask(worker, "shape", question.size, facts, question.seed))
            question, model = complete_question(question), ServedModel(question.size)
        # 2. Measure quality of all arms on the same tokens, before anything is timed.
        _check_memory(question, facts)
        task = QualityTask(
            model, question.tokens, question.arms, facts, question.seed, len(question.arms) * question.rollout
        )
        with observer.counting() as tell:
            tell(0, 1, "models", "quality on the same tokens")
            quality: Quality = _ask(worker, "quality", task)
    # 3. Measure times with the public suites; an interrupt keeps what exists.
    answer = ServingAnswer(question, facts.key, (), question.contexts[0], quality)
    try:
        answer = _measure_times(answer, facts, store, command, observer)
    except KeyboardInterrupt:
        return replace(answer, finished=False)
    # 4. Only a finished answer is stored: an incomplete one would be compared with complete ones.
    if not answer.finished:
        return answer
    try:
        kept_answers(store).append([answer])
    except StoreError as error:
        observer.note(str(error))
    return answer


def _ask(worker: Worker, name: str, *arguments: Any) -> Any:
    try:
        return getattr(cast(Any, worker.within(_LIMIT)), name)(*arguments)
    except WorkerFault as fault:
        raise as_usage(fault) from None


def complete_question(question: ServingQuestion) -> ServingQuestion:
    """Fills in the default contexts if none are named. Raises UsageError for positions that the model lacks, or rows
    that a format cannot divide into groups."""
    shape, usual = served_shape(question.size), _CONTEXTS[question.quick]
    few = tuple(sorted({shape.sequence * part // 8 for part in (1, 2, 4, 8)}))
    contexts = question.contexts or (few if usual[-1] > shape.sequence else usual)
    if math.gcd(*contexts) > 1:  # a cache in whole pages takes a step one token after a page
        contexts = tuple(sorted({*contexts, contexts[len(contexts) // 2 - 1] + 1}))
    if contexts[0] < 1 or contexts[-1] > shape.sequence:
        raise UsageError(
            f"--contexts goes from {contexts[0]} to {contexts[-1]}: {question.size} has positions for 1 to "
            f"{shape.sequence}."
        )
    for arm in question.arms:
        check_groups(shape, arm)
    return replace(question, contexts=contexts)


def _check_memory(question: ServingQuestion, facts: DeviceFacts) -> None:
    shape, first_arm, longest = served_shape(question.size), question.arms[0], max(question.contexts)
    reference = step_bytes(shape, first_arm, question.batch, longest, shape.experts).total  # with all experts
    least = max(served_memory(shape, question.batch, longest), reference)
    if facts.memory_bytes and least > facts.memory_bytes:
        raise UsageError(
            f"{question.size} with --batch {question.batch} at a context of {max(question.contexts)} takes "
            f"{size(least)} or more, and {facts.key} has {size(facts.memory_bytes)}. Choose a smaller batch, "
            "context or model."
        )


def shipped_model(tokens: int) -> ServedModel:
    return ServedModel(SHIPPED, SERVED_SIZES[SHIPPED], str(WEIGHTS), text=held_out_text(tokens))


def held_out_text(tokens: int) -> tuple[tuple[int, ...], ...]:
    """Returns windows of the modules that the shipped model was not trained on, in ASCII codes."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    text = "".join((folder / name).read_text(encoding="utf-8", errors="replace") for name in HELD_OUT)
    return _windows(text.encode("ascii", errors="replace"), WINDOW, tokens)


def _windows(ids: Sequence[int], length: int, tokens: int) -> tuple[tuple[int, ...], ...]:
    """Cuts windows spread over the whole text, because a module begins with only imports."""
    count = min(max(2, tokens // length), (len(ids) - 1) // length)
    starts = [place * ((len(ids) - length - 1) // count) for place in range(count)]
    return tuple(tuple(ids[start : start + length + 1]) for start in starts)


def _measure_times(
    answer: ServingAnswer, facts: DeviceFacts, store: Path, command: str, observer: JobObserver
) -> ServingAnswer:
    # 1. Choose the arms that multiply natively here; without the reference, times mean nothing.
    question = answer.question
    params = {"size": question.size, "kv": OWN, "weights": OWN}
    supports = {arm: served_support(params, precisions.get(dtype_of(arm)), facts) for arm in question.arms}
    reference = supports[question.arms[0]]
    if not reference.is_native:
        raise UsageError(
            f"the reference has no speed on {facts.key}: {reference.reason}. Give --reference fp32 or bf16."
        )
    native = tuple(arm for arm in question.arms if supports[arm].level is Level.NATIVE)

    def measure_suite(suite: str, arms: Sequence[ServedArm], **axes: Sequence[object]) -> Run:
        request = Request(
            suite,
            tuple(map(dtype_of, arms)),
            (facts.key,),
            dtype_of(arms[0]),
            tuple((name, tuple(map(str, values))) for name, values in axes.items()),
            quick=question.quick,
            seed=question.seed,
            threads=question.threads,
        )
        with observer.measuring() as watch:
            return execute(request, store, watch, command, origin="infer")

    # 2. Decode at every context, then process one prompt; an interrupt keeps the decoding.
    sizes: dict[str, Sequence[object]] = {"size": [question.size], "batch": [question.batch]}
    decode = measure_suite("decode", native, **sizes, context=question.contexts)
    runs = [decode]
    with suppress(KeyboardInterrupt):
        if decode.finished:
            runs.append(measure_suite("prefill", native, **sizes, context=[answer.prompt]))
    # 3. Fit a line for each arm, or give the reason why it has none.
    finished = len(runs) == 2 and runs[-1].finished
    question = question if finished else _measured_part(question, decode)
    times = list(times_of(question, native, decode, runs[-1]))
    kernels = {arm: supports[arm].reason for arm in question.arms}
    times = [replace(time, kernel=kernels[time.arm]) for time in times]
    times += [ArmTimes(arm, why=kernels[arm]) for arm in question.arms if arm not in native]
    # 4. Add the measured bandwidth, which limits decoding.
    ceiling = next((record.ceiling for record in decode.records if record.ceiling is not None), None)
    experts = experts_read(decode, question)
    return replace(
        answer,
        question=question,
        times=tuple(times),
        bandwidth=copy_rate(ceiling),
        runs=tuple(run.id for run in runs),
        experts=experts,
        finished=finished,
    )


def _measured_part(question: ServingQuestion, decode: Run) -> ServingQuestion:
    """Returns the question, restricted to what was measured before an interrupt."""
    measured = tuple(sorted({_context(record) for record in decode.records}))
    return replace(question, contexts=measured or question.contexts)


def experts_read(decode: Run, question: ServingQuestion) -> float | None:
    """Returns how many experts a layer reads on average, in the reference's step at the longest context."""
    for record in decode.records:
        experts = record.measurement("distinct_experts")
        if record.is_reference and _context(record) == question.contexts[-1] and experts and experts.samples:
            return experts.samples[0] / served_shape(question.size).layers
    return None


def _context(record: Record) -> int:
    return int(record.case.param("context"))


def times_of(question: ServingQuestion, native: Sequence[ServedArm], decode: Run, prefill: Run) -> Iterator[ArmTimes]:
    case_findings = findings(decode)
    reference: LineDraws | None = None
    # The reference comes first: the crossings of the others need its line.
    for arm in native:
        # 1. Collect its steps at each context, and why any was not timed.
        records = sorted((_context(record), record) for record in decode.records if is_of(record, arm))
        untimed = ((context, record.reason) for context, record in records if record.timing is None)
        reason = next((f"at a context of {context}: {skipped}" for context, skipped in untimed), "")
        rounds = {context: step_samples(record.timing) for context, record in records if record.timing is not None}
        # 2. Fit a line through all contexts or none: a crossing outside the timed ones is a guess.
        line = line_of(rounds) if len(rounds) == len(question.contexts) else None
        crossing = None
        if arm is native[0]:
            reference = line
        elif line is not None and reference is not None:
            crossing = crossing_of(line, reference, question.contexts)
        # 3. Collect labels that withdraw verdicts, and the time of the prompt.
        doubts: dict[str, None] = {}
        for _, record in records:
            doubts |= dict.fromkeys(label.value for label in case_findings[record.case.id].hard)
        prompts = (record for record in prefill.records if record.case.workload == "prefill" and is_of(record, arm))
        prompt = next(prompts, None)
        yield ArmTimes(
            arm,
            tuple((context, fastest(samples)) for context, samples in rounds.items()),
            None if line is None else line.line,
            crossing,
            None if prompt is None or prompt.timing is None else fastest(step_samples(prompt.timing)),
            reason,
            (_joules(prompt), _joules(records[-1][1] if records else None)),
            doubts=tuple(doubts),
        )


def _joules(record: Record | None) -> float | None:
    """Returns joules per token: the step's, over all tokens of its batch."""
    figures = None if record is None else energy_figures(record)
    return None if record is None or figures is None else figures.gross.middle / record.work.tokens


# Some models are trained under one name and served under another.
_SERVED_AS = {"gpt2-124m": "gpt2"}
_WITH_EXPERTS = "nano-moe"


def trained_model(word: str, store: Path, tokens: int) -> tuple[ServedModel, str]:
    """Returns the checkpoint that 'ID' or 'ID:ARM' names (without an arm the reference's), and the size to time for it.

    Raises UsageError for a training without a checkpoint, or whose model has no cache of keys and values.
    """
    # 1. Find the training and its arm.
    name, _, arm_name = word.partition(":")
    path = find_training(name, store)
    training = load_head(path)
    arms = {arm.name: arm for arm in training.arms}
    arm_name = arm_name or training.arms[0].name
    subject = f"the training {training.id}"
    if arm_name not in arms:
        raise UsageError(f"{subject} has no arm {arm_name!r:.80}. It has {', '.join(arms)}.")
    settings = arms[arm_name].merge_settings(training.request.settings)
    # 2. Accept only unsharded fp32 weights of a model with a cache.
    refusals = (
        (
            settings.arch not in ("gpt", "moe"),
            f"is of --arch {settings.arch}, of which no cache is served: gpt and moe are",
        ),
        (settings.parallel not in ("", "ddp"), f"is cut by --parallel {settings.parallel}: a rank has a part of it"),
        (settings.master != "fp32", f"keeps weights as --master {settings.master}: fp32 ones are read"),
    )
    for wrong, problem in refusals:
        if wrong:
            raise UsageError(f"{subject} {problem}. Choose another training.")
    # 3. Load its newest checkpoint; a training may have none.
    checkpoint = newest_checkpoint(path)
    if checkpoint is None:
        steps, every = training.request.steps, training.request.keep
        raise UsageError(
            f"{subject} has no checkpoint: it was trained {steps} steps, with --keep {every}. Train it again with "
            f"--keep {max(1, steps // 2)}, say."
        )
    folder, place = checkpoint
    # 4. Collect its location, its config, and text that it was not trained on.
    words = f"{arm_name} of training {training.id}, step {place.step} of {training.request.steps}"
    config = config_of(settings, training.text.vocabulary)
    folder = folder / "rank-0" if training.request.ranks else folder
    text = _windows(_tokens(training.text.held_out), config.sequence, tokens)
    size = _WITH_EXPERTS if config.experts else _SERVED_AS.get(settings.model, settings.model)
    return ServedModel(words, config, str(folder), arm_name, text), size


def _tokens(span: TokenSpan) -> array[int]:
    ids = array("H")
    try:
        with open_file(Path(span.path), most=None) as file:
            file.seek(span.start * ids.itemsize)
            ids.frombytes(file.read((span.stop - span.start) * ids.itemsize))
    except (OSError, ValueError) as error:
        raise UsageError(f"the training's text {span.path} cannot be read ({error}). Restore it.") from None
    if sys.byteorder == "big":
        ids.byteswap()
    return ids
