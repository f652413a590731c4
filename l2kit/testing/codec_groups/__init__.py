"""The codec suite, one module for each group of promises; `l2kit.testing.codec_conformance` joins them."""
