"""Moving loaders and pipelines over, and what becomes of them in words and in pixels."""
