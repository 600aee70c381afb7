"""Benchmarks for asv: thin modules over fp8bench."""
