"""Benchmarks: what a phase, a command, a method and a lesson take and come to; run from the root.

`python -m benchmarks` times a phase, `python -m benchmarks.results` trains the rows of
docs/results.md, and `python -m benchmarks.lessons` times the lessons.
"""
