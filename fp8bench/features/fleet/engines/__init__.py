"""Engines that start workers: one decorated class a file."""
