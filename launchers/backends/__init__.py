"""Where processes run: this machine, a Ray cluster, a Slurm job."""
