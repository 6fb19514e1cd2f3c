"""What the terminal shows of episodes and services."""
