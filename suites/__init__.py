"""What asv runs: thin modules over fp8bench."""
