"""Inference engines behind one interface, `paceline.interfaces.Engine`."""
