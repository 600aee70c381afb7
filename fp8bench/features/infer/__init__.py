"""Prefill and decode with a cache and weights in low precision: from which context it pays, and what it costs."""
