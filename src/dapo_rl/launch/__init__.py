"""`dapo launch`: the same training command on this host, as a Ray job, or as a Slurm job."""
