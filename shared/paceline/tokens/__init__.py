"""Text and tokens: tokenizer, chat template, transcripts."""
