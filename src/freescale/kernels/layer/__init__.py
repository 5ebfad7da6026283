"""The operations around the attention of an HSTU layer, and whole fused layers."""
