"""Parts of published methods: how jobs of tests name them, and parts that only tests have."""
