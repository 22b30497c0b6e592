"""L7: experiments, their stages, sweeps, and the commands: the only room that knows run folders."""
