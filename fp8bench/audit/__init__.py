"""The lie detector: whether a low-precision kernel computes what it promises, told by its results."""
