"""An experiment as jobs: the scripts of a Slurm cluster, or the same one after another on this machine."""
