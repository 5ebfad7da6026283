"""The sampled softmax, and scores of all items."""
