"""What surrounds the attention in an HSTU layer, and whole fused layers."""
