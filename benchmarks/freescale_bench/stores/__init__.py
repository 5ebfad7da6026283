"""Object stores: data, checkpoints and exports in a real S3 server, with errors and latency."""
