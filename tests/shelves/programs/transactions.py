# Transactions of all variables, and of some.
import numpy as np
import pymm

shelf = pymm.shelf("myTransactionsShelf", size_mb=1024, pmem_path="/mnt/pmem0", force_new=True)
for name in ("n", "m", "p"):
    setattr(shelf, name, pymm.ndarray((100, 100), dtype=np.uint8))
shelf.n += 1
shelf.n += 1

shelf.tx_begin_all()
for _ in np.arange(0, 10):
    shelf.n += 1
    shelf.m += 3
shelf.inspect(verbose=False)
shelf.tx_end()

shelf.tx_begin([shelf.n, shelf.m])
for _ in np.arange(0, 10):
    shelf.n += 1
    shelf.m += 3
print(shelf.items)
shelf.tx_end()
shelf.persist()
shelf.inspect(verbose=True)
assert [int(x[99, 99]) for x in (shelf.n, shelf.m, shelf.p)] == [22, 60, 0]
