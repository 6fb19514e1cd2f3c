"""Tells webhooks of users how their jobs have ended."""
