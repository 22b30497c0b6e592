"""Many coders trained side by side in one program, on one reading of the store.

config -> members (the grid, as whole experiments) -> programs (what differs only in seed, learning rate and sparsity
weight is one program) -> loop (all programs in step, resumable) -> run (the stage, which writes everything)
"""
