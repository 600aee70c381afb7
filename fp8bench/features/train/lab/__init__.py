"""Training in several precisions side by side, in the worker; and what watches a training."""
