"""The SSD tier: blocks on a local disk, with exact capacity, checksums and an index journal."""
