"""torch's own tests of `torch.distributed.checkpoint`, unchanged, over pmstore's writer and reader.

They come from a checkout of pytorch; nothing of them is in this repository.
`python -m tests.upstream CHECKOUT`, or `make nightly WHAT=upstream PYTORCH=CHECKOUT`.
"""
