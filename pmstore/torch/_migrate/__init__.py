"""A run of an edited program: what differs, and how the stored state is made to fit."""
