"""Contract tests and small test doubles for plug-in authors, one module per kind.

Each has `fulfils_the_contract(plugin, ...)`, which takes an installed name or the plug-in itself
and raises `AssertionError` for a violation. No test framework is needed:

    from paceline.testing import rewards
    rewards.fulfils_the_contract("mine", {"option": 1}, items=[rewards.item("42", answer="42")])

`engines.fulfils_the_contract` is a coroutine function, and `slots` needs torch.
"""
