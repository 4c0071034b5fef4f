"""LongDraft: faster long-context batch decoding, without changing what a model outputs."""
