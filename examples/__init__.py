"""Short programs over a store. Each can be killed at any instruction, and goes on where it was when
it is started again."""
