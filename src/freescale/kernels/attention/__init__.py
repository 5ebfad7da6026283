"""HSTU's attention over jagged histories, and softmax attention."""
