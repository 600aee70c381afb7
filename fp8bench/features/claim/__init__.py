"""Decide: confirm or refute a sentence about low precision."""
