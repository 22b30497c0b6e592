"""The jobs of saejax on a real Slurm: a controller and two nodes on this machine."""
