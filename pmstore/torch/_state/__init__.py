"""The state of a run in its store: model, optimizer, and where each tensor lies."""
