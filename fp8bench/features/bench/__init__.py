"""Measure: compare callables of your own with a reference: speed, error, memory."""
