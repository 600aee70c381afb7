"""Measure: begin in a project of your own: options, a workload, a CI file."""
