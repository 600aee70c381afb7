"""Measure: begin in your project: options, a workload, a CI file."""
