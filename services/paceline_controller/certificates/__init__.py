"""Issues and renews the certificates of an installation, as Secrets of its namespace."""
