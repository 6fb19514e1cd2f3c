"""Building blocks of methods: batches, surrogates, aggregation, group statistics."""
