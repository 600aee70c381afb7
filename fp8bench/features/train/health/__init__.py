"""Rules that detect problems of a training, one class per rule, from its stream of lines."""
