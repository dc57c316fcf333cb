"""Measurements. `python -m benchmarks` runs all that this machine can and prints a table; see CONTRIBUTING.md."""
