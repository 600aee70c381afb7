"""Decide: find sensitive layers, and a precision map that keeps the loss."""
