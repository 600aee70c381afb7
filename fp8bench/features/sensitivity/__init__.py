"""Which layers suffer most in low precision, and a map that keeps the loss."""
