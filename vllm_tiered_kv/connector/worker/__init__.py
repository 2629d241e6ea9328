"""The half of the connector in a worker process: it copies blocks between the GPU and the tiers."""
