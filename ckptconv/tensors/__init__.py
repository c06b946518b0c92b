"""Where the bytes of a tensor lie, and what happens to them on the way to their output.

`dtypes` names element types, `lazy` has `LazyTensor`, an expression over ranges of files, `moves` what it is
planned into, `geometry` the arithmetic of strides and boxes, `kernels` casts and gathers. Nothing here opens a
file."""
