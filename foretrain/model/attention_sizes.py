"""How attention as matrix products (attention.py) is cut, and what it keeps. No torch: the ledger counts with it.

Letters: T context, D width of a head, N = micro-batch x heads.
"""

GROUP_BYTES = 2 << 20  # of scores at one time: about what the second caches of two cores hold
WHOLE = 256  # the longest context whose queries are taken all at once
# Of a longer context, queries at one time, against the keys that they can see. Fewer skip more of the future, more make
# larger products: at T 512 and 1024 forward and backward took 8 to 15 % longer with 256, and as long or longer with 64.
ROWS = 128


def rows_at_once(T: int) -> int:
    """Queries that meet their keys at one time."""
    return T if T <= WHOLE else ROWS


def keeps_probabilities(T: int, D: int) -> bool:
    """Whether forward leaves the probabilities for backward: while they take no more than q, k, v and the result."""
    return 4 * D >= T and T <= WHOLE


def group_size(N: int, T: int, item_bytes: int) -> int:
    """Heads whose scores exist at one time, about GROUP_BYTES of them. Groups are even: a small rest would leave cores
    idle."""
    most = max(1, GROUP_BYTES // (rows_at_once(T) * T * item_bytes))
    return -(-N // -(-N // most))


def score_elements(N: int, T: int, item_bytes: int) -> int:
    return group_size(N, T, item_bytes) * rows_at_once(T) * T


def kept_elements(N: int, T: int, D: int) -> int:
    """Probabilities that wait for backward."""
    return N * T * T if keeps_probabilities(T, D) else 0
