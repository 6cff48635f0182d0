"""The golden net: what foretrain answers at another commit and here, over a fixed list of cases: `make golden BASE=…`.

A change that moves code and should change no answer is held by it. `cases.py` is the list, `runner.py` runs it in one
tree, `compare.py` finds the differences, `declared.py` names those that were meant.
"""
