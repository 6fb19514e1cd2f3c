"""Inference engines behind one interface, `paceline.plugins.Engine`."""
