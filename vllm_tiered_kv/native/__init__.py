"""Typed Python interface of the compiled modules."""
