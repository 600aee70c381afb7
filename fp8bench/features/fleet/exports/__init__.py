"""What a fleet is written as for schedulers that fp8bench does not call: one decorated class a file."""
