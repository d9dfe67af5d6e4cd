"""Benchmarks: one script per question, each a ratio against a peer in the same run."""
