"""The backends that run processes: this machine, a Ray cluster, a Slurm job."""
