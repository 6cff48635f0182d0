"""`foretrain doctor`: what works on this machine, what is missing for which command, and how to get it."""

from rich.text import Text

from foretrain.app.doctor import examine
from foretrain.base.messages import printable, say
from foretrain.cli.command import command, json_option
from foretrain.cli.common import OUT, print_json

EPILOG = """Examples:
foretrain doctor
foretrain doctor --json"""
STYLES = {"ok": "green", "note": "dim", "missing": "yellow"}


@command("doctor", EPILOG)
@json_option
def doctor_command(as_json: bool) -> None:
    """Check this machine: cards, driver, torch, compiler, memory, disk. Says what each command misses."""
    checks = examine()
    sentences = [say(f"doctor.{check.id}", **check.values) for check in checks]
    if as_json:
        listed = [{**check.to_json(), "message": message} for check, message in zip(checks, sentences, strict=True)]
        print_json({"schema": "foretrain.gpus/1#doctor", "checks": listed})
        return
    states = {state: say(f"doctor.state.{state}") for state in STYLES}
    width = max(map(len, states.values()))
    for check, message in zip(checks, sentences, strict=True):
        OUT.print(
            Text(f"{states[check.state]:<{width}}  ", STYLES[check.state]) + Text(printable(message)), soft_wrap=True
        )
        if check.cure:  # alone, to be copied
            OUT.print(Text(f"{'':<{width}}  {check.cure}", "bold"), soft_wrap=True)
    OUT.print(Text(say("doctor.end", count=sum(check.state == "missing" for check in checks))), soft_wrap=True)
