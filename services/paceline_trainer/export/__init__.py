"""A checkpoint as a model folder that others load: `python -m paceline_trainer.export`."""
