"""Use cases, each once: what the command line, the page and Python programs ask for."""
