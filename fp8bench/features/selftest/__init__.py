"""Machine: check the harness itself."""
