"""Which rank computes which sample. Cost and partition are pure; nothing here talks to other ranks."""
