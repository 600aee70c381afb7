"""Ways in which several ranks train one model together."""
