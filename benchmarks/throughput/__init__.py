"""The benchmark tables of the documents this project grew from, with its own numbers."""
