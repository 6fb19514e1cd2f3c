"""The SGLang engine: a server in its own virtual environment, driven over HTTP."""
