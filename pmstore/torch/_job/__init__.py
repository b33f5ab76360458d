"""A run of several ranks: how they join, and the rule that they agree on."""
