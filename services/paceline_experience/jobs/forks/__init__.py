"""Jobs that continue from a checkpoint of another job."""
