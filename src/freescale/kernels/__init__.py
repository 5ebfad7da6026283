"""The operations that have a GPU kernel: each a reference in plain torch and a twin in Triton;
`dispatch` chooses between them."""
