"""Sources of models for tests."""
