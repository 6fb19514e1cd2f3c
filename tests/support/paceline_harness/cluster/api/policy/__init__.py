"""What is decided about a request or an object: access, admission, quotas, deletion."""
