"""A store's content as other files.

array_files.py  safetensors and npz, in and out
description.py  what such files are told beside their arrays
compaction.py   a store written anew, without the space that is free
npz.py          npz files, read without trust
run_log.py      what runs have logged, as a data frame and as files
run_tensors.py  the tensors of a run, as safetensors in and out
"""
