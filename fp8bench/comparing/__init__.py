"""Two sides held against each other, case by case: what became better or worse, and how sure that is."""
