"""Contains the process of a rank, one of several processes that measure together, and the launcher of all ranks."""
