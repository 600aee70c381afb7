"""Understand: measure each option of a step alone, added, and left out."""
