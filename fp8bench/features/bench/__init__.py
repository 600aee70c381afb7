"""Measure: compare your callables with a reference: speed, error, memory."""
