"""Says what lies where in a checkpoint, and reads and writes its bytes."""
