"""Which layer of a case takes which precision: a request's map, held against the layers that its cases have."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

from fp8bench.answers import answering, sound_layers
from fp8bench.errors import UnknownName
from fp8bench.model import DeviceFacts, Level, Params, Request, Scalar, Support
from fp8bench.protocols import Layer, Workload, key_of, keys_of
from fp8bench.registry import precisions

PrecisionMap = tuple[tuple[str, str], ...]
# So many names show how they are made.
_SHOWN = 4


def layers_of(workload: Workload, settings: Iterable[Params]) -> list[Layer]:
    """The layers of all cases of a suite, each once."""
    with answering(workload):
        found = [sound_layers(workload, workload.layers(dict(params))) for params in settings]
    return list(dict.fromkeys(layer for layers in found for layer in layers))


def check_map(request: Request, layers: Sequence[Layer]) -> None:
    """Every key of the map must name a layer of some case."""
    known = keys_of(layers)
    for key, _ in request.precision_map:
        if key not in known:
            kinds = ", ".join(dict.fromkeys(layer.kind for layer in layers))
            names = ", ".join(layer.name for layer in layers[:_SHOWN])
            shown = f"{kinds}; layers by name ({names}, {len(layers)} in all), and front parts of names"
            raise UnknownName(f"layer of suite {request.suite}", key, known, shown if layers else "")


def mapped_support(
    workload: Workload, params: Mapping[str, Scalar], facts: DeviceFacts, layers: PrecisionMap
) -> Iterator[Support]:
    """How a device does the layers that a map names, key by key; a key may name none in this case."""
    own = sound_layers(workload, workload.layers(params)) if layers else ()
    keys = [key for key, _ in layers]
    for key, word in layers:
        if key not in keys_of(own):
            kinds = " and ".join(dict.fromkeys(layer.kind for layer in own)) or "none that a map could name"
            yield Support(Level.REFUSED, f"no layer is called {key} here, there are {kinds}: leave {key} unmapped")
        for kind in dict.fromkeys(layer.kind for layer in own if key_of(layer, keys) == key):
            yield workload.layer_support(kind, params, precisions.get(word), facts)
