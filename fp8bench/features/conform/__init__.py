"""Machine: check its native casts and products bit by bit."""
