"""Methods with which several ranks train one model together."""
