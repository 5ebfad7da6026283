"""Embedding tables sharded by row, in the place of a model's nn.Embedding modules."""
