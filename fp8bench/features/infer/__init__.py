"""Measure: decode with a cache and weights in low precision: from which context it pays."""
