"""Lazy tensors: places of a tensor's bytes in files, and their conversion on the way to the output.

`dtypes` names element types. `lazy` has `LazyTensor`, an expression over ranges of files, and `moves` the steps that it
is planned into; `computing` tensors that are computed from several. `strides` has the arithmetic of shapes and strides,
`geometry` of boxes, `kernels` casts and gathers. Nothing here opens a file.
"""
