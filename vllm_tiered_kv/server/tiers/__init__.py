"""Memory over SSD over a backing store: lookups, promotion, demotion, write-behind."""
