"""Measure: watch your training script without changing it."""
