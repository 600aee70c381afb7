"""Decide: recommend a precision, with reasons: adopt, keep layers high, or wait."""
