"""Measure: set up your project: options, a workload, a CI workflow."""
