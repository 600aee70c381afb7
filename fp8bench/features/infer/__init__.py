"""Measure: measure decoding with a low-precision cache and weights, by context."""
