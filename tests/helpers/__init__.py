"""What tests share: ranks, models and batches, cases, commands and a browser."""
