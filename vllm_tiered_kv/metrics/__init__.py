"""Metric names, defined once, and the recorder that counts."""
