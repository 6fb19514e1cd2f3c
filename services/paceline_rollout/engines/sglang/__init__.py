"""SGLang as an engine: a server in an environment of its own, spoken to over HTTP."""
