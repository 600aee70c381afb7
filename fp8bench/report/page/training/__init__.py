"""The report of a training: a page of its own, made of the same elements as that of runs."""
