"""`dapo plan`: the memory and time of a recipe on a number of GPUs, before it runs there."""
