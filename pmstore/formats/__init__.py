"""A store's content as other files.

portable.py     a whole store as one file, and back
exchange.py     safetensors and npz, in and out
description.py  what such files are told beside their arrays
compaction.py   a store written anew, without the space that is free
npz.py          npz files, read without trust
"""
