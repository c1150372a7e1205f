"""The memory of a run: one estimate for one GPU, for ranks, for `dapo check` and for `dapo plan`."""
