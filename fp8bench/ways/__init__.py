"""Ways of training in parallel by name: rules that a plan reads, and the model of a rank."""

from fp8bench.nn.parallel.way import Way
from fp8bench.registry import Registry

ways: Registry[Way] = Registry("way", "fp8bench.ways", Way, ("name", "summary"))
