"""What lies where in a checkpoint, and its bytes."""
