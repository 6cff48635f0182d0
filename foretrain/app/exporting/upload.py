"""The upload of an export to the Hub, only when somebody asks for it."""

import json
import re
import shlex
from collections.abc import Sequence
from pathlib import Path

from foretrain.base.errors import UserError
from foretrain.base.installation import need_extra

_REPOSITORY = re.compile(r"[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95}", re.ASCII)


def check_repository(name: str) -> None:
    """Raise UserError where a text is not owner/name."""
    if not _REPOSITORY.fullmatch(name):
        raise UserError("usage.push_name", name=name[:100])


def upload(name: str, folder: Path, files: Sequence[str], message: str) -> str:
    """Upload these files of a folder to the repository, in one commit; returns its address.

    A repository that is not there yet is made, private. Raises UserError; the folder stays as it is.
    """
    hub = need_extra("huggingface_hub", "export")
    kept = shlex.quote(str(folder))
    if not hub.get_token():
        raise UserError("environment.push_no_token", name=name, path=kept)
    api = hub.HfApi()
    try:
        address = api.create_repo(name, private=True, exist_ok=True)
        operations = [hub.CommitOperationAdd(path_in_repo=each, path_or_fileobj=folder / each) for each in files]
        api.create_commit(name, operations, commit_message=message)
    except Exception as error:  # of the network, of rights, of names: the library has a class for each
        raise UserError("environment.push_failed", name=name, path=kept, reason=_reason(error)) from None
    return str(address)


def _reason(error: BaseException) -> str:
    """The last line that says something: the library puts its request's number first."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    told = [line for line in lines if "Request ID" not in line] or lines or [type(error).__name__]
    return json.dumps(told[-1][:200], ensure_ascii=False)[1:-1].rstrip(".")
