"""Decide: find the layers that suffer, and a map that keeps the loss."""
