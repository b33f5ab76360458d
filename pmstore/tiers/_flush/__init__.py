"""Flushing: from a store to a tier.

flusher.py       the threads of a tier: which flush runs when
flush.py         the handle that `Store.flush` returns
epoch_writer.py  writes one epoch
plan.py          what an epoch has to look at
unchanged.py     whether a chunk is what the tier has already
publish.py       makes an epoch count, and lets older ones go
"""
