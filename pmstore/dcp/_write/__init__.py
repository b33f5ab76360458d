"""A checkpoint is written: parts in rank stores, one commit that publishes them."""
