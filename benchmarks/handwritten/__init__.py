"""The loops that a competent user writes without verl-adaptor: what `benchmarks/trainers.py` compares trainers with.

A module a framework, each with ``build(path, data) -> step``: `path` is a model folder, `data` the mini-batch as plain
tensors, and ``step()`` one optimizer step, which returns (loss, grad norm before clipping), the same on all ranks.
Nothing here imports verl-adaptor, except that Megatron needs its CPU shim where there is no CUDA.
"""
