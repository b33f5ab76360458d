"""Device mirrors: state that lives on an accelerator, copied into slots of the store at each
commit.

pending_commit.py  the handle of a commit under way
pinned_memory.py   blocks of the store that a device writes itself
copier.py          the seam between a device and host memory, and its two implementations
mirror.py          a mirrored tensor, or several in one pair of slots
registration.py    a tensor begins to be mirrored
mirrors.py         what a store mirrors, and what happens to it at commit and roll back
"""
