"""Object stores (s3://bucket/prefix), as paths: what takes a folder or a file takes these too."""
