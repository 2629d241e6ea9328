"""Identity of blocks: model fingerprint, settings, kernel formats, request keys, shards."""
