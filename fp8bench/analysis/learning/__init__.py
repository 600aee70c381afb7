"""What a training in several precisions says of how well each of them learns."""
