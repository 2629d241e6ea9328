"""A store in a directory that many hosts share, without a central index."""
