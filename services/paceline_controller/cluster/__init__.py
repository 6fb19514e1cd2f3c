"""The controller in Kubernetes: leader election and `TrainingJob` objects."""
