"""Two sides, each with workers of its own, measured case by case in the same rounds."""
