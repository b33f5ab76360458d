"""Writes checkpoints: parts in rank stores, and one commit that publishes them."""
