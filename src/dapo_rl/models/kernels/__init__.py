"""Fused kernels for a Hugging Face module: norms with their residual sums, gated activations, rotary embeddings, joint
projections, softmax statistics.

`module_patterns` finds the modules that a kernel can replace. `fuse_inference.fuse` changes a model for
decoding; `fuse_training.TrainingFusion` replaces forward passes during updates, with gradients. Liger has such kernels
too; these add the residual inside the norm and take float32 weights under autocast.
"""
