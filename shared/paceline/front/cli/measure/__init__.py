"""`paceline eval` and `paceline generate`: jobs of kind `eval`, and what becomes of them."""
