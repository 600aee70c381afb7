"""What a comparison is worth to a build: thresholds, doubt, one more look at the suspects, and a verdict."""
