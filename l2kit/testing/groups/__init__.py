"""The conformance suite, one module for each group of promises; `l2kit.testing.conformance` joins them."""
