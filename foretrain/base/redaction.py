"""Words of a command line without their secrets, for records and reports that a user may pass on."""

import re
from collections.abc import Sequence

from foretrain.base.errors import UserError

_HIDDEN = "…"
# A name that ends in `token` holds a secret, unless it is one of a vocabulary; so does one with any of _KEYS in it.
_VOCABULARY = (
    r"(?:[\w.-]*[-_.])?(?:pad|eos|bos|unk|mask|sep|cls|image|video|audio|start|end|stop|special|first|last|next)"
    r"[-_]?token(?![\w.-])"
)
_KEYS = (
    r"passw|passphrase|pwd|secret|credential|auth(?!or(?!i[sz]))|cookie|dsn|signature|(?<![a-z])sig(?![a-z])|connection[-_.]?string|webhook"
    r"|(?:api|access|private|account|storage|encryption|signing|hf|hub|github|wandb|comet|neptune|clearml)[-_.]?key"
)
_NAME = rf"(?<![\w.-])(?!{_VOCABULARY})[\w.-]*(?:token|(?:{_KEYS})[\w.-]*)(?![\w.-])"
_OPTION = re.compile(rf"(?i)(?=-){_NAME}")
_WHOLE = re.compile(rf"(?i)({_NAME}=).*", re.DOTALL)
_WITHIN = re.compile(
    rf"(?i)({_NAME}[\"']?\s*[=:]\s*|(?=-){_NAME}\s+)(?:(?:bearer|basic|token)\s+)?(?:\"[^\"]*\"?|'[^']*'?|[^\s&;,\"']+)"
)
_ADDRESS = re.compile(r"(://)(?:[^\s/@:]*:[^\s@]+|[^\s/@]+)@")  # user:password@host, and token@host
_BEARER = re.compile(r"(?i)(\bbearer\s+)[^\s\"']+")
_VALUE = re.compile(  # what tokens and keys of well-known services look like
    r"(?<![A-Za-z0-9_-])(?:"
    r"(?:hf|api_org|gh[opsur]|github_pat|npm|dckr_pat|gsk|r8|lsv2|wandb_v1)_[A-Za-z0-9_]{10,}(?![\w.-])"
    r"|(?:sk|rk|pk|glpat|pypi|xox[abeprs]|xapp|nvapi|rpa)-[\w-]{10,}|sk_(?:live|test)_\w+"
    r"|A(?:KI|SI|ID|RO)A[A-Z0-9]{12,}|AIza[\w-]{30,}|ya29\.[\w-]+|eyJ[\w-]{10,}\.[\w.-]+"
    r"|[0-9a-f]{40}(?![0-9a-zA-Z_]))"
    r"|-----BEGIN [A-Z ]*PRIVATE KEY-----.*",
    re.DOTALL,
)
_REVISION = re.compile(r"[0-9a-f]{40}")  # also what a commit looks like, which a message may name


def redacted(command: Sequence[str]) -> tuple[str, ...]:
    """The command's words; the value of one that looks like a secret is left out."""
    words: list[str] = []
    hide = False
    for word in command:
        words.append(_HIDDEN if hide else _redacted(word))
        hide = bool(_OPTION.fullmatch(word))
    return tuple(words)


def redacted_message(text: str) -> str:
    """A sentence without passwords in its addresses and without what looks like a token; names may stand in it."""
    shown = _VALUE.sub(lambda found: found[0] if _REVISION.fullmatch(found[0]) else _HIDDEN, text)
    return re.sub(r"(://)[^\s/@:]*:[^\s/@]+@", rf"\g<1>{_HIDDEN}@", shown)


def without_password(address: str) -> str:
    """An address that holds no secret. Raises UserError 'usage.secret_in_address': records and messages name it."""
    shown = redacted((address,))[0]
    user = address.partition("://")[2].partition("@")[0]
    if shown != address and (":" in user or "=" in address or _VALUE.search(user)):
        raise UserError("usage.secret_in_address", address=shown)
    return address


def _redacted(word: str) -> str:
    if whole := _WHOLE.fullmatch(word):
        return f"{whole[1]}{_HIDDEN}"
    for pattern in (_WITHIN, _BEARER):
        word = pattern.sub(rf"\g<1>{_HIDDEN}", word)
    return _VALUE.sub(_HIDDEN, _ADDRESS.sub(rf"\g<1>{_HIDDEN}@", word))
