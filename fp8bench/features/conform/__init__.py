"""Machine: check the device's casts and products bit by bit."""
