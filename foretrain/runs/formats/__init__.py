"""All log formats: those that the files here list as FORMATS. A new program is a new file."""

import pkgutil
from collections.abc import Iterator

from foretrain.runs.formats.log_format import LogFormat


def _found() -> Iterator[LogFormat]:
    for file in pkgutil.iter_modules(__path__):
        yield from getattr(__import__(f"{__name__}.{file.name}", fromlist=["FORMATS"]), "FORMATS", ())


# In order of precedence: a line that two formats could have printed is the first one's.
FORMATS: dict[str, LogFormat] = {
    format.name: format for format in sorted(_found(), key=lambda format: (format.place, format.name))
}
