"""Benchmarks: time, memory and results of phases and commands; run from the root.

`python -m benchmarks` times a phase, `python -m benchmarks.results` trains the rows of
docs/results.md.
"""
