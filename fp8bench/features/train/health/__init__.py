"""Rules that notice that a training is not well, one class a rule, over the lines that it streams."""
