"""One episode from reset to score: topology, turns of the policy, reward."""
