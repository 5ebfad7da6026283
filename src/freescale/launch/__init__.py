"""Processes of a run: starts the ranks of this machine, passes signals on, and restarts ranks after
a failure. Knows nothing of models."""
