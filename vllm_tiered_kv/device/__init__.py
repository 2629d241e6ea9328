"""Memory and copies: the arena and the back-ends that move blocks."""
