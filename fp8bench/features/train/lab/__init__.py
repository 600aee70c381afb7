"""Code of the worker: trains a model in several precisions side by side, and watches trainings."""
