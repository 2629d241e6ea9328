"""The half of the connector that lives with a worker: it copies."""
