"""The encoder's inputs: values, positions, dropout."""
