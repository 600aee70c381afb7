"""Understand: every option alone, added to those before it, and left out of all, in one run."""
