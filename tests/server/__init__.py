"""Tests of pagedkv.server: the official client over a real port, and what no client should send."""
