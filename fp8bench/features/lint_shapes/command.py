"""`fp8bench lint-shapes`: finds products that native low precision would refuse, without the device."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial

from fp8bench import units
from fp8bench.cli import option_types as types
from fp8bench.cli.options import shared
from fp8bench.cli.outputs import check_outputs, model_named, tell
from fp8bench.errors import EXIT_FAILED, EXIT_OK
from fp8bench.features.lint_shapes.job import Judgement, ShapeFinding, ShapeOutcome, lint_shapes
from fp8bench.formats.product_rules import Sides, conditions
from fp8bench.model.request import whole_number
from fp8bench.report.columns import Col, table
from fp8bench.report.data.plain import Rows
from fp8bench.report.elements import Element, Field, Items, Page, Part, Table, Text, Tone
from fp8bench.report.panels import together

# More products are only counted.
_MOST_NAMES = 4


def add(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Which products of linear layers native FP8, MX and NVFP4 would refuse on each class of devices, why, and what "
        "padding would cost. Needs no device, and times nothing."
    )
    parser.epilog = (
        "Exit codes: 0 every product fits as it is on some of the devices, in every mode; 2 wrong usage; 3 some "
        "product fits on none."
    )
    add = parser.add_argument
    add("name", nargs="?", metavar="MODEL", help="the same as --model NAME")
    words = "gpt2, llama3-8b, llama3-70b, deepseek-v3, a size of the suite transformer, or MODULE:FUNCTION of your own"
    add("--model", metavar="NAME", help=words)
    words = "layers instead: lines of MxNxK and a name, or CSV; M tokens, N features out, K in"
    add("--shapes", type=types.path, metavar="FILE", help=words)
    words = "rows of a known model's activations; default 8192, or those of a transformer's step"
    add("--tokens", type=types.whole(whole_number(1)), metavar="N", help=words)
    words = "forward, input-gradient, weight-gradient; default all three"
    add("--products", type=types.words, default=(), metavar="A,B", help=words)
    words = "as in suite; default those of fp8, fp8-rowwise, fp8-block, mxfp8, mxfp4 and nvfp4 that a device has"
    shared(parser, "--dtypes", help=words)
    words = "classes: a100, l40s, h100, b200, rtx5090, mi300x, mi350x, cpu (or hopper, sm90, gfx950, ...); default all"
    shared(parser, "--devices", help=words)
    shared(parser, "--json", help="print the findings as JSON instead")
    words = "also write them there, a row for each product, mode and device; '-' prints them instead"
    shared(parser, "--csv", help=words)


def run(arguments: argparse.Namespace) -> int:
    check_outputs(arguments)
    lint = lint_shapes(
        model_named(arguments), arguments.shapes, arguments.tokens, arguments.products, arguments.dtypes,
        arguments.devices,
    )  # fmt: skip
    tell(
        arguments, partial(page_of, lint.title, lint.findings), partial(value_of, lint.source, lint.findings),
        partial(rows_of, lint.findings),
    )  # fmt: skip
    return EXIT_FAILED if fitting_nowhere(lint.findings) else EXIT_OK


def page_of(title: str, findings: Sequence[ShapeFinding]) -> Page:
    """Shows what fits where, what does not and why, and a conclusion; leaves out parts that have nothing."""
    by_outcome = {
        outcome: [finding for finding in findings if finding.torch.outcome is outcome] for outcome in ShapeOutcome
    }
    padded = together(
        ((_name(finding), finding.product.sides, finding.torch.padded), finding)
        for finding in by_outcome[ShapeOutcome.PAD]
    )
    refused = _by_reason(by_outcome[ShapeOutcome.REFUSED], lambda finding: _why(finding.torch, padding=False), findings)
    sections: dict[str, Sequence[Element]] = {
        "products that fit as they are; -: there is no such product": [_overview(findings)],
        "refused, and no padding helps": _items(refused),
        "refused unless they are padded, and what that costs more": (
            [table("padded", "", _PADDED, padded.values())] if padded else []
        ),
        "why there is no such product": _items(_reasons(by_outcome[ShapeOutcome.MISSING])),
        "Transformer Engine, where it says more than torch": _items(_of_te(findings)),
        "what these products need besides their shape": _items(_needs(findings)),
    }
    parts = [Part(f"part-{n}", words, tuple(part)) for n, (words, part) in enumerate(sections.items()) if part]
    return Page(title, "", (*parts, Part("conclusion", "", (Text(conclusion(findings)),))))


def _items(lines: Iterable[str]) -> list[Element]:
    texts = tuple(map(Text, lines))
    return [Items(texts)] if texts else []


def conclusion(findings: Sequence[ShapeFinding]) -> str:
    lost = fitting_nowhere(findings)
    if not lost:
        return "Every product fits as it is on some of these devices, in every mode."
    by_mode = together((finding.mode, finding) for finding in lost)
    by_products = together((_products(some, findings), mode) for mode, some in by_mode.items())
    parts = [f"in {', '.join(modes)}: {products}" for products, modes in by_products.items()]
    return f"Not taken as they are by any of these devices, {'; '.join(parts)}."


def _overview(findings: Sequence[ShapeFinding]) -> Table:
    counts = together((_place(finding), finding.torch.outcome is ShapeOutcome.FITS) for finding in _existing(findings))

    def fitting(mode: str) -> Col[str]:
        return Col(mode, lambda device: _count(counts.get((mode, device))), number=True)

    modes, devices = (dict.fromkeys(names) for names in zip(*map(_place, findings), strict=True))
    return table("fitting", "", (Col[str]("device", str), *map(fitting, modes)), devices)


def _existing(findings: Iterable[ShapeFinding]) -> list[ShapeFinding]:
    return [finding for finding in findings if finding.torch.outcome is not ShapeOutcome.MISSING]


def _count(fits: Sequence[bool] | None) -> Field:
    if fits is None:
        return Field(units.NONE)
    return Field("all", tone=Tone.GOOD) if all(fits) else Field(f"{sum(fits)} of {len(fits)}", tone=Tone.DOUBT)


def _sides(sides: Sides | None) -> str:
    return units.NONE if sides is None else " x ".join(map(str, sides))


def _more(shares: Sequence[float]) -> str:
    decimals = 2 if max(shares) < 0.1 else 1 if max(shares) < 1 else 0
    return units.span(shares, lambda share: f"+{units.percent(share, decimals)}")


_PADDED: tuple[Col[list[ShapeFinding]], ...] = (
    Col("product", lambda same: _name(same[0])),
    Col("M x N x K", lambda same: _sides(same[0].product.sides), number=True),
    Col("padded to", lambda same: _sides(same[0].torch.padded), number=True),
    Col("FLOPs", lambda same: _more([finding.torch.more_flops for finding in same]), number=True),
    Col("bytes", lambda same: _more([finding.torch.more_bytes for finding in same]), number=True),
    Col("why", lambda same: "\n".join(_reasons(same)), below=True),
)


def _of_te(findings: Sequence[ShapeFinding]) -> Iterator[str]:
    """Yields what Transformer Engine objects to where torch takes the product, padded or not, and does not object."""
    by_torch = (ShapeOutcome.FITS, ShapeOutcome.PAD)
    stricter = [
        finding
        for finding in findings
        if finding.te and finding.torch.outcome in by_torch and _stricter(finding.te, finding.torch)
    ]

    def why(finding: ShapeFinding) -> list[str]:
        return [objection.why for objection in finding.te.objections] if finding.te else []

    return _by_reason(stricter, why, findings)


def _stricter(te: Judgement, torch: Judgement) -> bool:
    if te.outcome is not ShapeOutcome.PAD:
        return te.outcome is ShapeOutcome.REFUSED
    assert te.padded is not None
    return torch.padded is None or any(own > theirs for own, theirs in zip(te.padded, torch.padded, strict=True))


def _needs(findings: Sequence[ShapeFinding]) -> Iterator[str]:
    needs = {
        _place(finding): conditions(finding.product.scheme, finding.device)
        for finding in _existing(findings)
        if finding.product.scheme is not None
    }
    for words, places in together((words, place) for place, words in needs.items() if words).items():
        yield f"{_places(places)}: {', '.join(words)}"
    if needs:
        yield "everywhere: both operands with their contraction innermost, the second one column by column"


def _by_reason(
    some: Sequence[ShapeFinding], why: Callable[[ShapeFinding], list[str]], findings: Sequence[ShapeFinding]
) -> Iterator[str]:
    """Yields a line for each list of reasons that several findings share."""
    for reasons, same in together(("; ".join(why(finding)), finding) for finding in some).items():
        yield f"{reasons}: {_products(same, findings)}, {_places(dict.fromkeys(map(_place, same)))}"


def _why(judgement: Judgement, padding: bool = True) -> list[str]:
    """Lists the objections and whose they are; without `padding`, only those that padding cannot answer."""
    return [
        f"{objection.why} ({objection.source})"
        for objection in judgement.objections
        if padding or objection.multiples is None
    ]


def _products(some: Sequence[ShapeFinding], findings: Sequence[ShapeFinding]) -> str:
    names = dict.fromkeys(map(_name, some))
    # A layer that is called with other rows has its name again.
    count, every = (len({(each.shape, each.kind) for each in several}) for several in (some, findings))
    if count == every:
        return "every product"
    return ", ".join(names) if len(names) <= _MOST_NAMES else f"{count} of {every} products"


def _reasons(findings: Iterable[ShapeFinding]) -> Iterator[str]:
    """Yields each of torch's objections once, with the modes and devices that it holds for."""
    for why, where in together((why, _place(finding)) for finding in findings for why in _why(finding.torch)).items():
        yield f"{why}: {_places(where)}"


def _places(places: Iterable[tuple[str, str]]) -> str:
    """Writes modes and devices like 'fp8, fp8-rowwise on l40s, h100; fp8-block on h100'."""
    devices = together(dict.fromkeys(places))
    modes = together((tuple(names), mode) for mode, names in devices.items())
    return "; ".join(f"{', '.join(same)} on {', '.join(names)}" for names, same in modes.items())


def _place(finding: ShapeFinding) -> tuple[str, str]:
    return finding.mode, finding.device.name


def _name(finding: ShapeFinding) -> str:
    return f"{finding.shape.name} {finding.kind}"


def value_of(source: str, findings: Sequence[ShapeFinding]) -> dict[str, object]:
    documents = [
        {
            **_product(finding),
            "torch": _judgement(finding.torch),
            "transformer_engine": finding.te and _judgement(finding.te),
        }
        for finding in findings
    ]
    return {"source": source, "fits": not fitting_nowhere(findings), "findings": documents}


def rows_of(findings: Sequence[ShapeFinding]) -> Rows:
    rows = [
        {**_product(finding), "by": by, **_columns(judgement)}
        for finding in findings
        for by, judgement in (("torch", finding.torch), ("Transformer Engine", finding.te))
        if judgement is not None
    ]
    return tuple(rows[0]), rows


def _product(finding: ShapeFinding) -> dict[str, object]:
    m, n, k = finding.product.sides
    return {
        "layer": finding.shape.name, "product": finding.kind, "m": m, "n": n, "k": k, "output": finding.product.output,
        "layout": "row" if finding.product.row_major else "column", "mode": finding.mode, "device": finding.device.name,
    }  # fmt: skip


def _columns(judgement: Judgement) -> dict[str, object]:
    m, n, k = judgement.padded or (None, None, None)
    flops, sizes = (judgement.more_flops, judgement.more_bytes) if judgement.padded else (None, None)
    return {
        "outcome": judgement.outcome.value, "why": "; ".join(_why(judgement)),
        "padded_m": m, "padded_n": n, "padded_k": k, "more_flops": flops, "more_bytes": sizes,
    }  # fmt: skip


def _judgement(judgement: Judgement) -> dict[str, object]:
    objections = [{"by": objection.source.value, "why": objection.why} for objection in judgement.objections]
    costs = {"padded": judgement.padded, "more_flops": judgement.more_flops, "more_bytes": judgement.more_bytes}
    return {"outcome": judgement.outcome.value, "objections": objections, **costs}


def fitting_nowhere(findings: Sequence[ShapeFinding]) -> list[ShapeFinding]:
    """Returns one finding for each product and mode that fits on none of the devices as it is."""
    by_product = together(((finding.shape, finding.kind, finding.mode), finding) for finding in findings)
    return [
        same[0] for same in by_product.values() if all(each.torch.outcome is not ShapeOutcome.FITS for each in same)
    ]
