"""Reconciles wanted jobs with running processes or pods."""
