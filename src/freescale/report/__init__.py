"""What a run looked like: the HTML page and the terminal."""
