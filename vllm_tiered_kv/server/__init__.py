"""The daemon: tiers behind a socket."""
