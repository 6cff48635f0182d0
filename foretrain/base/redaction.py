"""Words of a command line without their secrets, for records and reports that a user may pass on."""

import re
from collections.abc import Sequence

_SECRET = re.compile(r"(?i)(api[-_]?key|secret|passw|credential|auth|(access|hf|bearer|github|wandb)[-_]?(token|key))")
_HIDDEN = "…"


def redacted(command: Sequence[str]) -> tuple[str, ...]:
    """The command's words; the value of one that looks like a secret is left out."""
    words: list[str] = []
    hide = False
    for word in command:
        name, sign, _ = word.partition("=")
        secret = bool(_SECRET.search(name))
        words.append(_HIDDEN if hide else f"{name}={_HIDDEN}" if secret and sign else word)
        hide = secret and not sign and name.startswith("-")
    return tuple(words)
