"""`foretrain verify`: 24 short runs on this machine's card, predicted against measured; a file to contribute."""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from click.exceptions import Exit
from rich.text import Text

from foretrain.app.train import need_torch
from foretrain.base.errors import ExitCode
from foretrain.base.messages import printable, say
from foretrain.base.signals import Terminated
from foretrain.cli.command import command, flag, json_option, option, quiet_option
from foretrain.cli.common import ERR, OUT, Status, print_json, working, wrong_value
from foretrain.cli.completion import among
from foretrain.measure import verify_record, verify_session
from foretrain.measure.verify_record import Outcome, Verification
from foretrain.measure.verify_session import FILLING, ON_A_CARD, Target, about_s
from foretrain.reports import text
from foretrain.reports.views import agreement as verify_view
from foretrain.reports.views.agreement import errors_of, why

EPILOG = """Examples:
foretrain verify
foretrain verify --only 124M --again
foretrain verify --show foretrain-verify-nvidia-geforce-rtx-4070.json
foretrain verify --device cpu   (8 small cases, for a machine without a card)"""


def case_words() -> list[str]:
    return list(dict.fromkeys(word.strip(",") for case in (*ON_A_CARD, *FILLING) for word in case.label.split()))


@command("verify", EPILOG)
@option("--device", "cuda, cuda:N or cpu.", default="cuda", shell_complete=among(lambda: ["cuda", "cuda:1", "cpu"]))
@option(
    "--only TEXT", "Run only the cases that have this text in their name.", default="", shell_complete=among(case_words)
)
@flag("--again", "Run cases that are done once more.")
@option("--show FILE", "Show the results in this file; measure nothing.", type=Path)
@option("--out FILE", "File of the results. Default: foretrain-verify-CARD.json.", type=Path)
@option("--name", "Your GitHub name, shown with your contribution.", default="")
@json_option
@quiet_option
def verify_command(
    device: str, only: str, again: bool, show: Path | None, out: Path | None, name: str, as_json: bool, quiet: bool
) -> None:
    """Run 24 short cases on this card and compare them with their predictions: about ten minutes."""

    if show is not None:
        _print(verify_record.read(show), show, as_json=as_json, contribute=False)
        return

    if not re.fullmatch(r"cpu|cuda(:\d{1,2})?", device):
        raise wrong_value("--device", device, "one_of", choices="cuda, cuda:N, cpu")
    if len(name) > 39 or not re.fullmatch(r"([A-Za-z0-9](-?[A-Za-z0-9])*)?", name):
        raise wrong_value("--name", name, "github_name")
    need_torch()
    quiet = quiet or as_json
    with working(say("verify.asking"), quiet=quiet):
        where = verify_session.target(device)
    path = out or Path(f"foretrain-verify-{_slug(where.machine.device)}.json")
    found, code = _run(where, path, Asked(only, again, name, quiet))
    if code:
        _tell_end(found, path)
    if as_json or not code:
        _print(found, path, as_json=as_json, contribute=True)
    if code:
        raise Exit(int(code))


@dataclass(frozen=True)
class Asked:
    only: str
    again: bool
    name: str
    quiet: bool


def _run(where: Target, path: Path, asked: Asked) -> tuple[Verification, ExitCode]:
    """(what is in the file now, how it ended): a signal ends it with what is kept."""

    progress = Progress(quiet=asked.quiet)
    try:
        found = verify_session.begin(path, where, asked.name, progress)
        places = verify_session.to_do(found, asked.only, again=asked.again)
        if not asked.quiet:
            _say_before(found, places, where, path)
        return verify_session.work(found, places, where, path, progress), ExitCode.DONE
    except KeyboardInterrupt as end:
        code = ExitCode.STOPPED if isinstance(end, Terminated) else ExitCode.INTERRUPTED
        if not path.is_file():
            raise Exit(int(code)) from None
        return verify_record.read(path), code
    finally:
        progress.close()


def _slug(name: str) -> str:
    """'NVIDIA GeForce RTX 4070' -> 'nvidia-geforce-rtx-4070'."""
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")[:60]


def _say_before(found: Verification, places: list[int], where: Target, path: Path) -> None:
    """What is going to happen, how long it takes, and who else uses the card."""

    cases = [found.outcomes[i].case for i in places]
    done = len(found.outcomes) - len(found.of("waiting"))
    if done:
        _tell("verify.continued", done=done, count=len(found.outcomes), path=str(path))
    if not cases:
        _tell("verify.nothing")
        return
    _tell("verify.intro", count=len(cases), device=where.machine.device, about=about_s(cases))
    free, used, busy = where.now()
    if used and free is not None:
        _tell("verify.others", used=used, free=free)
    if busy:
        _tell("verify.busy", style="yellow")


def _tell(id: str, /, *, style: str = "", **values: Any) -> None:
    ERR.print(Text(printable(say(id, **values)), style=style), soft_wrap=True)


def _tell_end(found: Verification, path: Path) -> None:
    done = len(found.outcomes) - len(found.of("waiting"))
    _tell("verify.stopped", done=done, count=len(found.outcomes), path=str(path))


def _print(found: Verification, path: Path, *, as_json: bool, contribute: bool) -> None:
    if as_json:
        print_json(found.as_json())
        return

    text.render(verify_view.verify_document(found, str(path) if contribute else ""), OUT)


class Progress(Status):
    """Each case a line on stderr; what is being done now in a line that changes, on a terminal."""

    def __init__(self, *, quiet: bool) -> None:
        super().__init__()
        self.quiet = quiet

    def __call__(self, id: str, values: dict[str, Any]) -> None:
        if id in ("damaged", "other"):  # shown even where all else is quiet: a file has another name now
            self.close()
            _tell(f"verify.{id}", style="yellow", **values)
        elif self.quiet:
            return
        elif id == "tracing":
            self.show(say("verify.tracing", **values))
        elif id == "case":
            counts = {name: values[name] for name in ("number", "count", "left")}
            self.show(say("verify.running", **counts, what=values["case"].label))
        else:
            self.close()
            outcome: Outcome = values["outcome"]
            counts = {"number": values["number"], "count": values["count"], "what": outcome.case.label}
            _tell("verify.done", style="dim", **counts, figures=_figures(outcome))


def _figures(outcome: Outcome) -> str:
    return errors_of(outcome) if outcome.status == "measured" else why(outcome).text()
