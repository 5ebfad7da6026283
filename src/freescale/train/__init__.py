"""The training loop and what goes with it: checkpoints, evaluation, local ranks."""
