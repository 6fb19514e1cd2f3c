"""Worlds that live in processes of their job, several episodes in each."""
