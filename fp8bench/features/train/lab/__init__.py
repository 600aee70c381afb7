"""Training in several precisions side by side, in the worker; and observation of trainings."""
