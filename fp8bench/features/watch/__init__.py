"""Measure: watch the training of your script, without changing it."""
