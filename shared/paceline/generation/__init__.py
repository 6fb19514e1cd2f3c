"""Which task is next, how many episodes it gets, which groups are kept and replayed."""
