"""Benchmarks: time, memory and results of phases, commands and lessons; run from the root.

`python -m benchmarks` times a phase, `python -m benchmarks.results` trains the rows of
docs/results.md, and `python -m benchmarks.lessons` times the lessons.
"""
