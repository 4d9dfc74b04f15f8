"""Reel's bundled models: how they are trained, and what is checked of them."""
