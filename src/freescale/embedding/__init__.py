"""Embedding tables sharded by row: layout, row optimizers, exchange, and the swap of a model's
nn.Embedding modules."""
