"""How the gradients of the dense parameters are summed over the ranks."""
