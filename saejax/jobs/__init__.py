"""Jobs: processes that run commands for someone. The page, `saejax jobs local` and Slurm launch one runner."""
