"""Models of what a scheduler learns: costs, failures, times."""
