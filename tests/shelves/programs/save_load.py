# A snapshot with numpy's own save and load, then PyMM's checkpoints of nested values.
import os
import tempfile

import numpy as np
import pymm

shelf = pymm.shelf("myShelf", size_mb=1024, pmem_path="/mnt/pmem0", backend="hstore-cc", force_new=True)
with tempfile.TemporaryDirectory() as folder:
    shelf.w = np.ndarray((10000), dtype=np.uint8)
    shelf.w.fill(1)
    np.save(os.path.join(folder, "savedSnapshot"), shelf.w)
    shelf.w.fill(3)
    shelf.w = np.load(os.path.join(folder, "savedSnapshot.npy"))
    assert np.all(shelf.w == 1)
shelf.erase("w")

shelf.save({"a": 1, "b": ["mylistzero", "mylistone"]}, shelf_var_name="example")
assert shelf.get_item_names() == [
    "example__+dict_#str#_#a#__#int#",
    "example__+dict_#str#_#b#__+list_0__#str#",
    "example__+dict_#str#_#b#__+list_1__#str#",
]
assert shelf.load("example") == {"a": 1, "b": ["mylistzero", "mylistone"]}
