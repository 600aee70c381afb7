"""Decide: adopt a precision, keep layers high, or do nothing, and why."""
