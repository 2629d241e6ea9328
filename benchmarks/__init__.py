"""Programs that measure. Each prints its ratios, writes JSON, and says on what it ran."""
