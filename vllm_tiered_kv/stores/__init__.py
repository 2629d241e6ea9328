"""Places that hold blocks by key; one contract for all of them."""
