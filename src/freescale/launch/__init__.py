"""Processes of a run: starts the ranks of this machine, passes signals on, and starts ranks again
after a failure. Knows nothing of models."""
