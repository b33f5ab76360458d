"""What a store holds: arrays, tensors, values, groups, lists, slots.

values.py       values as bytes
dtypes.py       dtypes as text
axes.py         the order of an array's axes
array.py        numpy arrays over blocks
tensor.py       torch tensors over blocks
core.py         what the objects of an open store share: its pool, how descriptions are read
torch_hooks.py  a tensor that is sent to another process
collectives.py  a tensor that torch.distributed receives into
names.py        what a name may be, and what is in the way of a new one
entries.py      what a group has, told without the data
new_array.py    a new array or tensor
lists.py        lists
slots.py        two versions of an array, of which one is current
containers.py   groups
soundness.py    whether all that a store holds decodes
"""
