"""How much engine and trainer disagree on sampled tokens, and which worker is wrong."""
