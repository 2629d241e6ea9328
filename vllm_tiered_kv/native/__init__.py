"""Typed Python face of the compiled modules: addresses and sizes in, errors out."""
