"""Shared fixtures: the tiny random model T0, the embedded model, the packaged novels."""
