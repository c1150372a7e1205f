"""The policy on several ranks: sharded weights, the processes that hold them, and the driver that commands them."""
