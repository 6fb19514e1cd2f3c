"""Building blocks of a service process: chassis, health, liveness, membership, children."""
