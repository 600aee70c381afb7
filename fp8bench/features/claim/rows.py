"""Reads claims files (TOML), and refuses rows that nothing can decide, each in a sentence."""

from __future__ import annotations

import math
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from fp8bench.errors import UnknownName, UsageError
from fp8bench.features.claim.expressions import evaluate
from fp8bench.features.claim.values import SPEEDUPS, Claim, ClaimKind, Source
from fp8bench.files import read_file
from fp8bench.model.codec import Malformed, decode
from fp8bench.model.specs import METRICS, MetricSpec, spec_of

_RELATIONS = {"=": 1, "<": 1, "<=": 1, ">": 1, ">=": 1, "between": 2}
_NEEDED = {
    ClaimKind.ARITHMETIC: ("figure", "relation", "bound"),
    ClaimKind.MEASURED: ("run", "figure", "relation", "bound", "device"),
    ClaimKind.ALL_OF: ("parts",),
}
# Figures of a training's arm; a gap is a share of the reference's loss.
TRAINING_FIGURES = (
    "loss",
    "held_out",
    "gap",
    "held_out_gap",
    "tokens_per_second",
    "bytes_per_parameter",
    "peak_memory",
    "device_peak_memory",
    "wire_bytes",
    "joules_per_step",
)
_SPEED = r"fast\w*|slow\w*|quick\w*|speed\w*|throughput|latency|performance"
# Words for times in a sentence that arithmetic shall decide. A peak speed is a figure of a datasheet, not a time.
_TIMES = rf"(?<!peak )(?:{_SPEED}|time|duration|seconds)"
# Words of a sentence, the figures that measure what they promise, and what would measure it.
_PROMISES = (
    (r"accura\w*|qualit\w*", r"accuracy|score", "accuracy is of a task, and no figure of a run or a training here"),
    (r"converge\w*|loss(?:es)?", r"loss|gap|held_out", "measure `gap` of a training"),
    (r"energy|joules|power (?:draw|consumption)", r"energy|joules|power", "measure `energy ratio`"),
    (r"memory|footprint", r"memory|bytes|batch", "measure `device_peak_memory ratio`"),
    (_SPEED, r"time|speedup|per_second|ceiling_rate", "measure `speedup`"),
)
# Units of metrics of which a sum over cases means something.
_ADDITIVE = ("s", "J", "B", "FLOP", "count")
# Runs that train, as a sentence on training promises.
_TRAINS = re.compile(r"train\b|suite (transformer|learning|vision|diffusion|moe|parallel)\b")


@dataclass(frozen=True)
class ClaimsFile:
    """The rows of a claims file by id, and the file's text."""

    name: str
    text: str
    claims: Mapping[str, Claim]


_LARGEST_BYTES = 4 << 20


def load_catalogue() -> ClaimsFile:
    """Reads the claims that come with fp8bench."""
    return parse_claims("the catalogue", read_file(Path(__file__).with_name("catalogue.toml")).decode())


def load_claims(path: Path) -> ClaimsFile:
    try:
        return parse_claims(str(path), read_file(path, _LARGEST_BYTES).decode())
    except OSError as error:
        raise UsageError(f"the claims file {path} cannot be read ({error.strerror}). Give a .toml file.") from None
    except UnicodeDecodeError:
        raise UsageError(f"the claims file {path} is not UTF-8 text. Save it as such.") from None


def parse_claims(name: str, text: str) -> ClaimsFile:
    try:
        content = tomllib.loads(text)
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise UsageError(f"{name} is not TOML: {error}.") from None
    rows, sources = content.get("claim"), content.get("source", {})
    if not isinstance(rows, list) or not rows or not all(isinstance(row, dict) for row in rows):
        raise UsageError(f"{name} has no claims. Begin each with a line [[claim]]; docs/claims.md shows a row.")
    if (unknown := {*content} - {"claim", "source"}) or not isinstance(sources, dict):
        place = min(unknown, default="source")
        raise UsageError(
            f"{name}: {place!r:.40} is misplaced. A claims file has [[claim]] rows and [source.KEY] tables."
        )
    claims: dict[str, Claim] = {}
    for number, row in enumerate(rows, 1):
        try:
            claim = parse_row(row, sources)
        except UsageError as error:
            raise UsageError(f"{name}, {row.get('id') or f'claim {number}'!s:.80}: {error}") from None
        if claim.id in claims:
            raise UsageError(f"{name} has two claims with the id {claim.id}. Rename one.")
        claims[claim.id] = claim
    return ClaimsFile(name, text, claims)


def parse_row(row: Mapping[str, Any], sources: Mapping[str, Any]) -> Claim:
    """Converts a row, whose source may be a key of `sources`. Raises UsageError for a row that nothing can decide."""
    # 1. Names and types.
    names = [field.name for field in fields(Claim)]
    for key in row:
        if key not in names:
            raise UnknownName("key of a claim", key, names)
    for key in ("id", "sentence", "source", "kind"):
        if not row.get(key):
            raise UsageError(f"`{key}` is missing. Every claim has an id, a sentence, a source and a kind.")
    source = _find_source(row["source"], sources)
    if row["kind"] not in [*ClaimKind]:
        raise UsageError(f"kind {row['kind']!r:.40} is not one of {', '.join(ClaimKind)}. Give one of these.")
    try:
        claim = decode(Claim, {**_as_plain(row), "source": source})
    except (Malformed, OverflowError) as error:
        raise UsageError(f"{error}. docs/claims.md says what each key takes.") from None
    # 2. Whether the row can be decided.
    _check_complete(claim)
    if claim.kind is not ClaimKind.ALL_OF:
        _check_bound(claim)
    if claim.kind is ClaimKind.ARITHMETIC:
        _check_arithmetic(claim)
    elif claim.kind is ClaimKind.MEASURED:
        _check_promises(claim)
        _check_resolution(claim, _spec_of_figure(claim))
    return claim


def _find_source(source: object, sources: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a source that is written out in its row, or the table that it names."""
    if isinstance(source, str):
        if source not in sources:
            raise UnknownName("source", source, sources, "those of the file's [source.KEY] tables")
        source = sources[source] | {"key": source} if isinstance(sources[source], dict) else None
    if not isinstance(source, dict) or {*source, "key"} != {field.name for field in fields(Source)}:
        raise UsageError(
            "source has to be a table with title, publisher, year and address, or the key of such a table."
        )
    return source


def _as_plain(row: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the row with lists where a single value may be given, and its case as pairs of texts."""
    plain = dict(row)
    for key in ("bound", "device", "parts", "also"):
        if key in plain and not isinstance(plain[key], list):
            plain[key] = [plain[key]]
    if isinstance(case := plain.get("case"), dict):
        plain["case"] = [[name, str(value)] for name, value in case.items()]
    return plain


def _check_complete(claim: Claim) -> None:
    for key in _NEEDED[claim.kind]:
        if getattr(claim, key) in ("", ()):
            hint = ' Add device = "any" if numbers alone decide, else "cpu", "cuda" or cards.' * (key == "device")
            raise UsageError(f"`{key}` is missing, and a claim that is {claim.kind} needs it.{hint}")
    if claim.kind is ClaimKind.MEASURED:
        key = "arm" if claim.run.startswith("train") else "mode"
        if key not in dict(claim.case):
            raise UsageError(f'`case` names no {key}, so which precision is meant? Add case = {{ {key} = "fp8" }}.')
    for key in ("card", "power", "library"):
        if getattr(claim, key) and not (claim.published and claim.kind is ClaimKind.MEASURED):
            raise UsageError(f"`{key}` is a condition of a published measurement. Set published = true, or remove it.")
    if not (claim.power is None or 0 < claim.power < math.inf) or not 0 <= claim.seconds < math.inf:
        raise UsageError("`power` takes watts, and `seconds` the length of the run, both above 0. Correct them.")


def _check_bound(claim: Claim) -> None:
    if claim.relation not in _RELATIONS:
        raise UsageError(f"relation {claim.relation!r:.20} is not one of {' '.join(_RELATIONS)}. Give one of these.")
    count = _RELATIONS[claim.relation]
    if len(claim.bound) != count or not all(map(math.isfinite, claim.bound)) or claim.bound[0] > claim.bound[-1]:
        form = "two numbers, the lower one first" if count == 2 else "one number"
        raise UsageError(f"the relation {claim.relation} takes {form} as its bound. Correct `bound`.")
    if not 0 <= claim.tolerance < 1 or (claim.tolerance and claim.relation not in ("=", "between")):
        raise UsageError(
            "a tolerance is a share such as 0.01, of the relations = and between. For the others move the bound."
        )


def _check_arithmetic(claim: Claim) -> None:
    if words := _find(_TIMES, claim.sentence):
        raise UsageError(
            f"{words!r} is about times, and no arithmetic bounds a ratio of two times. Measure it, or reword the "
            "sentence to be about peaks, as in 'peak speed'."
        )
    evaluate(claim.figure)


def _find(words: str, sentence: str) -> str:
    """Returns the first of some words in a sentence, '' if it has none."""
    found = re.search(rf"\b(?:{words})\b", sentence, re.IGNORECASE)
    return found[0] if found else ""


def _check_promises(claim: Claim) -> None:
    """Refuses a sentence that promises more than its figure measures."""
    for words, figures, remedy in _PROMISES:
        promise = _find(words, claim.sentence)
        if promise and not re.search(figures, claim.figure):
            raise UsageError(
                f"{promise!r} promises more than {claim.figure} measures: {remedy}. Reword the sentence, or change the "
                "figure."
            )
    training = _find(r"train\w*", claim.sentence)
    if training and not _TRAINS.match(claim.run):
        raise UsageError(
            f"{training!r} promises more than `{claim.run}` measures, which does not train. Reword the sentence, or "
            "run `train` or the suite transformer."
        )
    if claim.figure in SPEEDUPS and "any" in claim.device:
        raise UsageError("a speed is of a device, and device = \"any\" names none. Name cards, or 'cuda'.")


def _check_resolution(claim: Claim, spec: MetricSpec | None) -> None:
    """Refuses a bound that the figure cannot decide, and a limit of a ratio."""
    step = resolution_of(claim, spec)
    words = f"{claim.figure} has a resolution of {100 * step:g}%, which cannot"
    if claim.relation == "=" and claim.tolerance < step:
        raise UsageError(f"{words} decide a tolerance of {100 * claim.tolerance:g}%. Widen the tolerance.")
    if claim.is_ratio and any(0 < abs(bound - 1) < step for bound in claim.bound):
        raise UsageError(f"{words} tell {claim.bound[0]:g} from 1. Move the bound.")
    if claim.sum and (spec is None or spec.unit not in _ADDITIVE):
        raise UsageError(f"a sum of {claim.metric} over cases means nothing. Remove `sum`, and name one case.")
    if claim.limit:
        _check_limit(claim, spec)


def _check_limit(claim: Claim, spec: MetricSpec | None) -> None:
    if claim.is_ratio:
        raise UsageError(
            f"two lower bounds on time bound no ratio of times, so {claim.figure} has no limit. Remove `limit`."
        )
    if spec is None or spec.unit not in ("s", "FLOP/s", "B/s", "tok/s"):
        raise UsageError(f"only a time or a rate has a limit, and {claim.figure} is neither. Remove `limit`.")
    devices = {device.lower() for device in evaluate(claim.limit).citations.values()}
    if devices != {device.lower() for device in claim.device} or len(devices) != 1:
        raise UsageError(
            "`limit` is of one datasheet and refutes nothing on another card, so `device` has to name that card in "
            'full. Write limit = "h200_sxm.bf16" and device = "H200 SXM".'
        )


def _spec_of_figure(claim: Claim) -> MetricSpec | None:
    """Returns the metric of a run that the figure is computed from; None for a figure of a training."""
    name = claim.metric
    if claim.run.startswith("train"):
        if name not in TRAINING_FIGURES:
            raise UnknownName("figure of a training", name, TRAINING_FIGURES)
        if claim.is_ratio and name in ("gap", "held_out_gap"):
            raise UsageError(f"{name} is a share of the reference's loss already, and has no ratio. Remove ` ratio`.")
        return None
    # Figures that suites name themselves end in words that the table of metrics has.
    spec = spec_of(name)
    if name not in METRICS and not spec.description:
        names = [metric for metric in METRICS if "*" not in metric]
        raise UnknownName("figure of a run", name, names, "speedup, sustained_speedup, and those of docs/reference.md")
    return spec


_TRAINING_RESOLUTION = {"loss": 0.001, "held_out": 0.001, "tokens_per_second": 0.01, "joules_per_step": 0.01}


def resolution_of(claim: Claim, spec: MetricSpec | None) -> float:
    """Returns the smallest share by which the figure can differ for reasons that the claim is not about; 0 is exact."""
    if claim.figure in SPEEDUPS:
        return 0.01
    if spec is None:
        return _TRAINING_RESOLUTION.get(claim.metric, 0.0)
    return 0.0 if spec.counted or spec.unit in ("B", "count") else spec.least_change
