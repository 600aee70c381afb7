"""Measure: spread a plan over many processes or machines."""
