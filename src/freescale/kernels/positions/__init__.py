"""The inputs of the encoder: values plus positions, with dropout."""
