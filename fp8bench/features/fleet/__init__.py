"""Have the cells of a plan measured by many processes, and see where they stand."""
