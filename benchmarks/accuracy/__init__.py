"""What foretrain predicts against what others measured on their GPUs.

    python -m benchmarks.accuracy [--checkouts DIR] [--only ID …]

The measured figures, their sources and settings are in cases.json; none was measured by us and nothing is fitted to them.
A case of another project's program runs that program, from a checkout in DIR, under `foretrain.trace`.
"""
