"""Stores of an earlier commit: each opens, and the run in it goes on to the same bits.

`programs.py` has the program of each kind, `<kind>.tar.xz` what its first life left when it was
killed, `<kind>.json` what the rest of the run gives. `write.py` wrote them;
tests/formats/test_golden.py goes on from them.
"""
