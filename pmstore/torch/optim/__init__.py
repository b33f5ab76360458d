"""Optimizers that write the other slot: a commit at every step without a copy of the state.

`AdamW`, `Adam` and `SGD` are torch's, by name, defaults and arithmetic (the fused CPU kernels'), in
native code on all cores. On their own they update in place. Attached
(`pmstore.torch.attach(store, model=..., optimizer=...)`), parameters and moments are slots: a step
writes the next version of all of them into the idle slot and flips; the commit only writes it back.
"""

from pmstore.torch.optim.adam import Adam, AdamW
from pmstore.torch.optim.sgd import SGD

__all__ = ["SGD", "Adam", "AdamW"]
