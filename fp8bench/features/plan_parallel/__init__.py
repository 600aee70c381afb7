"""How to cut a training for many GPUs: memory and pace by formulas, held against published rows."""
