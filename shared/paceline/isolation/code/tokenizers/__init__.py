"""Tokenizers and chat templates of jobs, in processes of their job or in this one."""
