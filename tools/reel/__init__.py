"""Training and verification of Reel's bundled models."""
