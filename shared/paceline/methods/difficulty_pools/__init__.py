"""Difficulty pools: normal tasks first, with fixed shares of easy and hard ones.

Known from open trainers (prime-rl's buffer): what all samples solve or none teaches nothing today,
but a small share of it tells when that has changed.
"""

from paceline.plugins import Method, Plugin

METHOD = Method(
    stage="generate",
    evidence="notes",
    parts={"samplers": {"difficulty_pools": Plugin(".sampler:DifficultyPools")}},
)
