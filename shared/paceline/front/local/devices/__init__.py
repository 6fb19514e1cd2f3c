"""GPUs of one machine: which there are, what a job wants of them, and who gets which."""
