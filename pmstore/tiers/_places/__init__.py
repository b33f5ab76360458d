"""Places that tiers lie in: directories, and whatever fsspec reaches.

place.py   the contract of a place
local.py   a directory
fsspec.py  any URL that fsspec knows
url.py     which place a URL names; the places of all ranks, read as one
"""
