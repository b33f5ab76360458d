"""What pmstore does on a GPU, checked and measured where there is one: `make nightly
WHAT=gpu-check`.

Needs torch with CUDA, and this checkout; nothing from a network. Writes a page of results as JSON.
`--device cpu` takes the same steps with host memory as the device, so that each of them has run
before it meets a GPU; what only a GPU can show is then said to be not checked.
"""
