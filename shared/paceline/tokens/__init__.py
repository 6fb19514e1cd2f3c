"""Tokenizer, chat template and transcripts."""
