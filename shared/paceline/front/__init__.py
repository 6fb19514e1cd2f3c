"""The doors for users: command line, SDK, documents of the API, one machine."""
