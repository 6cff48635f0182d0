"""Use cases, each once: what the command line, the page and Python programs ask for. Typed in, a record out. Nothing
here prints: callbacks get the progress, and what is wrong is a UserError."""
