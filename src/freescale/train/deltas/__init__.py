"""Deltas: what a run publishes of itself while it trains, for services that follow it."""
