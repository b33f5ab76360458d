# A list of numbers, strings and arrays.
import numpy as np
import pymm

shelf = pymm.shelf("myShelf", size_mb=1024, pmem_path="/mnt/pmem0", backend="hstore-cc", force_new=True)
shelf.x = pymm.linked_list()
shelf.x.append(123)
shelf.x.append(1.321)
shelf.x.append(np.ndarray((3, 3), dtype=np.uint8))
shelf.x.append("Hello list!")
shelf.x.append("Goodbye list!")
assert shelf.x[0] == 123
assert shelf.x[1] == 1.321
assert shelf.x[2].shape == (3, 3)
assert shelf.x[3] == "Hello list!"

shelf.x[0] = 999
assert shelf.x[0] == 999
shelf.x[1] = np.ones(3)
assert np.array_equal(shelf.x[1], np.ones(3))
shelf.x[1] = np.zeros(4)
assert np.array_equal(shelf.x[1], np.zeros(4))
assert shelf.items == ["x"]
shelf.x.append(100)
shelf.x[-1] -= 1
assert shelf.x[-1] == 99
for outside in (100, -100):
    try:
        shelf.x[outside] = 0
    except RuntimeError:
        pass
    else:
        raise AssertionError("an index that is out of range")
assert len(shelf.x) == 6
assert len([element for element in shelf.x]) == 6
assert str(shelf.x).startswith("[999, array([0., 0., 0., 0.])")

shelf.y = pymm.linked_list()
for number in (1, 2, 3):
    shelf.y.append(number)
del shelf.y[1]
assert len(shelf.y) == 2
assert [shelf.y[0], shelf.y[1]] == [1, 3]
shelf.erase("y")
assert shelf.y is None
