"""Documentation site: README, docs/, lessons and API pages, staged and built with Sphinx."""
