"""What a scheduler learns: costs, failures, times."""
