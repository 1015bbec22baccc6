"""What is measured: FlashInfer's kernels (`trtllm`) and portable Triton ones (`portable`), behind the same names.

Importing this package imports neither: each module brings its own heavy dependency.
"""
