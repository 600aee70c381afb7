"""Training in several precisions beside each other, in the worker; and what watches a training."""
