"""Sockets, sessions and limits of the daemon."""
