# Variables of every type, found again by a second shelf on the same pool.
import gc

import numpy as np
import pymm
import torch

shelf = pymm.shelf("myShelf", size_mb=1024, pmem_path="/mnt/pmem0", force_new=True)
shelf.s = "Hello"
shelf.s += " world!"
shelf.f = 1.123
shelf.fm = 2.2
shelf.fm += 1.1
shelf.i = 911
shelf.im = 900
shelf.im += 99
shelf.nd = np.ones((3,))
shelf.nd2 = np.identity(10)
shelf.b = b"This is a bytes type"
shelf.bm = b"This is a "
shelf.bm += b"modified bytes type"
shelf.t = torch.tensor([[1, 1, 1, 1, 1], [2, 2, 2, 2, 2], [3, 3, 3, 3, 3]])
shelf.l = pymm.linked_list()
shelf.l.append(1)
shelf.l.append(2)
shelf.l.append("z")
del shelf
gc.collect()

shelf = pymm.shelf("myShelf", pmem_path="/mnt/pmem0", force_new=False)
assert shelf.s == "Hello world!"
assert list(shelf.s)[:2] == ["H", "e"]
assert shelf.f == 1.123
assert round(shelf.fm, 2) == 3.30
assert shelf.i == 911
assert shelf.im == 999
assert np.array_equal(shelf.nd, np.ones((3,)))
assert np.array_equal(shelf.nd2, np.identity(10))
assert shelf.b == b"This is a bytes type"
assert shelf.bm == b"This is a modified bytes type"
assert shelf.t.equal(torch.tensor([[1, 1, 1, 1, 1], [2, 2, 2, 2, 2], [3, 3, 3, 3, 3]]))
assert shelf.l[0] == 1
assert shelf.l[1] == 2
assert shelf.l[2] == "z"
assert "nd2" in shelf.items
