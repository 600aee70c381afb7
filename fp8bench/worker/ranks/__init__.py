"""One of several processes that measure together, and their launcher."""
