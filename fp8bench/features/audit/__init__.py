"""Whether a kernel of your own computes what its precision promises."""
