"""Benchmarks: `python -m bench.NAME [--quick] --json FILE` prints a table and writes what it measured."""
