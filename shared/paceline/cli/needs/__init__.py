"""What a job needs of this machine, before it starts: memory and GPUs."""
