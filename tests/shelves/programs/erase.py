# Variables erased, by name and as objects.
import gc

import numpy as np
import pymm

shelf = pymm.shelf("myShelf", size_mb=1024, pmem_path="/mnt/pmem0", force_new=True)
shelf.x = 9
shelf.y = 10
shelf.n = pymm.ndarray((9, 9))
shelf.t = pymm.torch_tensor([[8, 8], [9, 9]])
shelf.b = b"El ni\xc3\xb1o come camar\xc3\xb3n"
shelf.l = pymm.linked_list()
shelf.l.append(1)
for variable in ("n", "b", "t", "l"):
    shelf.erase(getattr(shelf, variable))
shelf.erase("x")
assert shelf.items == ["y"]
gc.collect()
shelf.erase(shelf.y)
assert shelf.items == []
shelf.w = np.ones(3)
assert "pymm.ndarray" in shelf.supported_types()
assert 0 < shelf.used < 100
assert shelf.get_percent_used() == shelf.used
