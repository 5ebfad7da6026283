"""Benchmarks that come with the package: `freescale bench`."""
