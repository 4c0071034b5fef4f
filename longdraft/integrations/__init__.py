"""LongDraft's drafts inside other people's engines. Nothing else of the package imports from here."""
