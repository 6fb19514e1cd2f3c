"""Contract suites and small doubles for the authors of plug-ins: one module for each kind.

Each has `fulfils_the_contract(plugin, ...)`, which takes an installed name or the plug-in itself
and raises `AssertionError` with what is wrong. No test framework is needed:

    from paceline.testing import rewards
    rewards.fulfils_the_contract("mine", {"option": 1}, items=[rewards.item("42", answer="42")])

`engines.fulfils_the_contract` is a coroutine function, and `objectives` needs torch.
"""
