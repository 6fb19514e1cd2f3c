"""Rewards that come with Paceline."""
