"""An installation in a cluster with a real API and a real controller, whose nodes are played."""
