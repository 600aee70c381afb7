"""Changes over a history: where figures stepped up or down, what was acknowledged of that, and all of it as text."""
