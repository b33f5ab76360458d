"""The engine (native/), typed: all that Python knows of it.

_native          the engine and its cffi binding, compiled; _build_ffi.py builds it
_binding         the steps between Python and the engine that no interrupt may split, in C
constants.py     numbers that calls take and give: kinds of objects, modes, domains
failures.py      a status becomes an exception
pool.py          an open store: the calls that work on what it holds
pool_info.py     what is fixed of it from its open on
inspection.py    looking at all of it, and mending it
store_info.py    what is told of a store, as frozen dataclasses
snapshot.py      snapshots, transfers and checksums, for tiers
landing.py       commits of what arrives from a device, for mirrors
optim.py         steps of optimizers
block_wait.py    `async with store.transaction()`
fault_handler.py the engine's stays the first
crash_points.py  where a crash test kills
"""
