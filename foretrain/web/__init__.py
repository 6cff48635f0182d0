"""The local page: the planner and the runs in a browser, on this machine only. Needs the extra `serve`; no torch."""
