"""Measuring: layer shapes, this machine's limits, one layer on any backend, a whole model, and reports."""
