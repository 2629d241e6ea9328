"""Tests for vLLM releases that are refused; `make matrix` runs them where one is installed."""
