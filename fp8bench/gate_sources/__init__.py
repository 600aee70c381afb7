"""Where a gate's comparisons come from, and how its suspects are measured again: two sides, a duel, the history."""
