"""From histories to batches: splits, orders, windows, negatives, and the workers that make them."""
