"""`DAPOTrainer`'s TRL face: the arguments of `GRPOTrainer`, `GRPOConfig`, callbacks, and the names of metrics."""
