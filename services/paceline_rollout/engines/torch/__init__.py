"""The embedded engine: any Hugging Face causal LM, continuous batching, on CPU or one device."""
