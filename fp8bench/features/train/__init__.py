"""Measure: train a model in several precisions: does it still learn?"""
