"""The engine (native/), typed: all that Python knows of it.

_native        the engine and its cffi binding, compiled; _build_ffi.py builds it
_binding       the steps between Python and the engine that no interrupt may split, in C
_ffi.py        each call of the engine as a method; only here a status becomes an exception
snapshot.py    snapshots, transfers and checksums, for tiers
landing.py     commits of what arrives from a device, for mirrors
waiting.py     `async with store.transaction()`
reports.py     what the engine says of a store, as frozen dataclasses
"""
