"""Tests of the models that benchmarks compare with."""
