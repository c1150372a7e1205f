"""Triton kernels of the update on a GPU, with their gradients.

Liger has such kernels too; these add the residual inside the norm and take float32 weights under autocast.
"""
