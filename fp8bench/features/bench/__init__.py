"""Measure: compare your functions with a reference: speed, error, memory."""
