"""Verdicts on how well each arm learns: loss curves, gaps over seeds, speed to the same loss, and scores."""
