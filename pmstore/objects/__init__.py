"""What a store holds: arrays, tensors, values, groups, lists, slots.

core.py         what the objects of an open store share: its pool, how descriptions are read
values.py       values as bytes
dtypes.py       dtypes as text
array.py        numpy arrays over blocks
tensor.py       torch tensors over blocks
axes.py         the order of an array's axes
containers.py   groups
lists.py        lists
slots.py        two versions of an array, of which one is current
sharing.py      a tensor that is sent to another process
collectives.py  a tensor that torch.distributed receives into
"""
