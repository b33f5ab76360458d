"""Restoring: from a tier to a store.

choose.py   which epoch is read
restore.py  makes a store of it
"""
