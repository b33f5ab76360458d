"""Rules that say when to commit."""
