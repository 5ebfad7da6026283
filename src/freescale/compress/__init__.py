"""Opt-in compression (Dynamic Communication Thresholding, arXiv 2010.08899): what is small waits,
or does not travel at all."""
