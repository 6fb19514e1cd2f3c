"""Installations of which a test needs gateway and experience only, and their settings."""
