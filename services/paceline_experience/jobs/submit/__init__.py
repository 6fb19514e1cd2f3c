"""What is checked of a job before it is accepted: by the service, and beside a command line."""
