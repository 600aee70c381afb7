"""Measure: watch the training of a script of your own, without changing it."""
