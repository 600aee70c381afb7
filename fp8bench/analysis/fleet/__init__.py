"""A fleet's machines beside each other: which compare, which are odd, and in what."""
