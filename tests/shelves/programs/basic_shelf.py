# A matrix on a shelf, a reference to it, and a copy of it beside it.
import gc

import numpy as np
import pymm

shelf = pymm.shelf("myShelf", size_mb=32, backend="hstore-cc", pmem_path="/mnt/pmem0")
shelf.m = np.arange(0, 9).reshape(3, 3)
assert shelf.m.name == "m"
ref = shelf.m
assert ref.addr == shelf.m.addr

shelf.n = shelf.m
shelf.n += 10
assert shelf.m.tolist() == [[0, 1, 2], [3, 4, 5], [6, 7, 8]]
assert shelf.n.tolist() == [[10, 11, 12], [13, 14, 15], [16, 17, 18]]
assert shelf.n.addr != shelf.m.addr

del ref
gc.collect()
shelf.erase("n")
shelf.erase("m")
assert shelf.items == []
assert shelf.m is None
