"""What a training on many GPUs takes of memory, sends, and comes to, by formulas; held against published rows."""
