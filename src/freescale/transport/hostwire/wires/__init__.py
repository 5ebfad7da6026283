"""What carries pieces of host memory from rank to rank."""
