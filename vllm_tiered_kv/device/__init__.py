"""Memory and copies: arenas, and the back-ends that copy blocks between GPU and host."""
