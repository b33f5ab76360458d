"""Epochs of a tier: their files, and which of them stay.

manifest.py     the record that makes an epoch
listing.py      which epochs a tier has, and whether they are whole
content.py      the bytes of one epoch, each chunk checked
image.py        the objects in them
sharding.py     which rank flushes what
kept_epochs.py  epochs that stay whatever `keep` says
leases.py       epochs that somebody reads
retention.py    which epochs and files stay; deletes the others
"""
