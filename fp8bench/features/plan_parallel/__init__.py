"""Decide: divide a training among many GPUs, by formulas."""
