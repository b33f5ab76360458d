"""Benchmarks: one question a file, figures as ratios measured in one run.
`python -m benchmarks [--quick] [question ...]`."""
