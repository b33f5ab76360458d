"""The end of a step, and its progress: steps, schedule, losses, a transaction by hand."""
