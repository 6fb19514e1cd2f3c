"""Checkpoints: atomic, verified by digests, on disks and object stores."""
