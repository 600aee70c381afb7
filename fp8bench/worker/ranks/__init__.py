"""One of several processes that measure together, and what launches them."""
