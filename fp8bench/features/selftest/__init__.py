"""Check the harness itself."""
