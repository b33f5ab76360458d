"""A checkpoint is read: from folders, runs and epochs."""
