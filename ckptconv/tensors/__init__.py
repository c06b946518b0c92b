"""Where the bytes of a tensor are, and how they are converted on the way to the output.

`dtypes` names element types. `lazy` has `LazyTensor`, an expression over ranges of files, and `moves` the steps that it
is planned into; `computing` what is computed of several. `strides` has the arithmetic of shapes and strides,
`geometry` of boxes, `kernels` casts and gathers. Nothing here opens a file.
"""
