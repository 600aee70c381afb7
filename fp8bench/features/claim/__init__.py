"""Decide: confirm or refute a statement about low precision."""
