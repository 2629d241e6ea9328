"""Parts of docs/benchmarks.md, one a module; `benchmarks/report.py` puts them together."""
