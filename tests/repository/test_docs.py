"""README and docs tell the truth: commands work, links lead somewhere, no page is lost."""

import gzip
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from foretrain.base.errors import ExitCode
from foretrain.cli import app
from foretrain.config.finetune.options import OPTION_OF
from foretrain.config.inference import Inference
from foretrain.config.options import OPTIONS
from foretrain.config.resolve import ALIASES
from tests.kit.command import REPO, foretrain
from tests.kit.docs_commands import PAGES, Command, commands, inline

sys.path.insert(0, str(REPO / "docs"))
import build_site
import command_pages

VERBS = dict(command_pages.commands())
TRACED = ("--exact", "--explain", "--largest", "--snapshot")  # a minute of processor time each
ELSEWHERE = {"foretrain demo": "tests/app/test_demo.py", "foretrain serve": "tests/web/test_page.py"}


# -- links ----------------------------------------------------------------------------------------------------------


def bare(page: Path) -> str:
    """The page without its code, in which a link is none."""
    text = re.sub(r"^(`{3,})[^`\n]*\n.*?^\1$", "", page.read_text("utf-8"), flags=re.DOTALL | re.MULTILINE)
    return re.sub(r"`[^`\n]+`", "code", text)


def anchors(page: Path) -> set[str]:
    headings = re.findall(r"^#+ (.+)$", page.read_text("utf-8"), re.MULTILINE)
    words = [
        re.sub(r"[^\w\s-]", "", heading.encode("ascii", "ignore").decode()).strip().lower() for heading in headings
    ]
    return {re.sub(r"[-\s]+", "-", word) for word in words}


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_links_lead_somewhere(page: Path) -> None:
    for target, anchor in re.findall(r"\]\((?!https?:)([^)#\s]*)(?:#([^)\s]+))?\)", bare(page)):
        path = page.parent / target if target else page
        assert path.exists(), target
        if anchor:
            assert anchor in anchors(path), f"{target}#{anchor}"


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_pictures_say_what_they_show(page: Path) -> None:
    for text, target in re.findall(r"!\[([^]]*)\]\(([^)]+)\)", bare(page)):
        assert text, target


# What a native reader stops at, and what to write instead.
NOT_PLAIN = {
    r"\b(tokens|ms|s|seconds|bytes|nats|bits|kernels|rows?|lines?|one|process|files?|times|steps|sequences|codes) an? "
    r"(step|card|run|byte|token|rank|minute|second|line|machine|hour|file|process|day|layer|parameter|kWh)\b": "per",
    r"\bof (today|before)\b|\bof (its|their) own\b": "current, earlier; its own",
    r"\bbeside\b": "alongside, in addition to",
    r"\b(is|are|was|were) (said|told)\b|\b(tells?|told)\b": "shows, reports, lists",
    r"\bin turns?\b|\bby (itself|themselves)\b|\banew\b": "in alternation, automatically, again",
    r"\d %": "94%",
    r"\b(was|were) ours\b|\bat hand\b|\bquicker\b|\bwould do\b|\bleft out\b|\bput in\b|\btold apart\b": "plain words",
    r"\bso many\b|\bas (it is|they are)\b": "that many; unchanged",
    r"(?:^|[.:;] )What [a-z]+ [a-z]+ [a-z]+ (is|are|was|were|does|do|has|have)\b": "name the thing",
}


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_a_page_is_in_plain_english(page: Path) -> None:
    prose = re.sub(r"<!-- generated:.*?<!-- end -->", "", bare(page), flags=re.DOTALL)
    for pattern, better in NOT_PLAIN.items():
        found = [prose[max(0, m.start() - 40) : m.end() + 20] for m in re.finditer(pattern, prose, re.MULTILINE)]
        assert not found, (better, found)


def test_no_page_is_an_orphan() -> None:
    linked = {
        (page.parent / target).resolve()
        for page in PAGES
        for target in re.findall(r"\]\((?!https?:)([^)#\s]+)", bare(page))
        if (page.parent / target).resolve() != page
    }
    for page in (REPO / "docs").glob("*.md"):
        assert page.resolve() in linked, page.name


# -- the site -------------------------------------------------------------------------------------------------------


def test_every_page_has_one_place_in_the_navigation() -> None:
    placed = [name for names in build_site.navigation().values() for name in names]
    assert sorted(placed) == sorted(build_site.sources())
    assert placed[0] == "index.md"


def test_a_page_is_in_the_group_it_names(tmp_path: Path) -> None:
    page = tmp_path / "a.md"
    page.write_text("<!-- section: Train -->\n# A\n", "utf-8")
    assert build_site.sections({**build_site.sources(), "a.md": page})["Train"][-1] == "a.md"
    for first_line in ("# A", "<!-- section: Nowhere -->"):
        page.write_text(f"{first_line}\n", "utf-8")
        with pytest.raises(SystemExit, match="section"):
            build_site.sections({**build_site.sources(), "a.md": page})


def test_the_gathered_pages_link_to_each_other(tmp_path: Path) -> None:
    """Without the theme: what the site is built of has no link that leads out of it."""
    build_site.stage(tmp_path)
    pages = sorted((tmp_path / "pages").rglob("*.md"))
    assert len(pages) > len(build_site.sources())
    for page in pages:
        for target in re.findall(r"\]\((?!https?:)([^)#\s]+)", bare(page)):
            assert (page.parent / target).exists(), (page.name, target)
    config = tomllib.loads((tmp_path / "zensical.toml").read_text("utf-8"))["project"]
    assert [next(iter(entry)) for entry in config["nav"]] == list(build_site.navigation())


def test_the_site_builds_without_a_warning(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("zensical")
    assert build_site.build(tmp_path) == 0, capfd.readouterr()
    site = tmp_path / "site"
    for name in build_site.sources():
        assert (site / Path(name).with_suffix(".html")).is_file(), name
    broken = tmp_path / "pages" / "index.md"
    broken.write_text(broken.read_text("utf-8") + "\n[x](memory.md#nowhere)\n", "utf-8")
    command = [sys.executable, "-m", "zensical", "build", "--strict", "--config-file", str(tmp_path / "zensical.toml")]
    assert subprocess.run(command, capture_output=True, check=False).returncode  # strict is strict


# -- commands -------------------------------------------------------------------------------------------------------


def verbs_of(words: list[str]) -> list[tuple[str, list[str]]]:
    """(verb, the words behind it); several where the text says `data info|verify`."""
    depth = 2 if any(name.split()[0] == words[1] and " " in name for name in VERBS) else 1
    names = words[depth].split("|") if len(words) > depth else [""]
    return [(" ".join([*words[1:depth], name]), words[depth + 1 :]) for name in names]


def unknown_options(command: Command) -> list[str]:
    if len(command.words) == 1 or command.words[1].isupper():  # `foretrain COMMAND --help`
        return []
    wrong = []
    for verb, words in verbs_of(command.words):
        found = VERBS.get(verb)
        if found is None:
            return [verb]
        known = {name for param in found.params for name in (*param.opts, *param.secondary_opts)} | {"--help", "--"}
        if found.context_settings.get("ignore_unknown_options"):
            names = [
                *(knob.name for knob in OPTIONS.values()),
                *ALIASES,
                *((*OPTION_OF, *Inference.model_fields, "inference") if verb in ("plan", "advise", "report") else ()),
            ]
            known |= {f"--{name}" for name in names} | {f"--{name.replace('_', '-')}" for name in names}
        words = words[: words.index("--")] if "--" in words else words
        options = [re.split(r"[=\]|]", word.lstrip("["))[0] for word in words if word.lstrip("[").startswith("--")]
        wrong += [option for option in options if option not in known]
    return wrong


def test_every_option_in_the_docs_exists() -> None:
    listed = [command for command in (*commands(), *inline()) if command.words[0] == "foretrain"]
    assert len(listed) > 150
    wrong = {(c.page, c.text): found for c in listed if (found := unknown_options(c))}
    assert not wrong


def test_an_unknown_option_is_found() -> None:
    for text in ("foretrain plan x.py --cards 4070", "foretrain plann", "foretrain gpus --batch_size=8"):
        assert unknown_options(Command("", text, ""))
    assert not unknown_options(Command("", "foretrain plan x.py --batch-size 8 --gpu 4070", ""))


def test_installing_and_making_name_what_is_there() -> None:
    extras = set(tomllib.loads((REPO / "pyproject.toml").read_text("utf-8"))["project"]["optional-dependencies"])
    targets = set(re.findall(r"^([a-z-]+):", (REPO / "Makefile").read_text("utf-8"), re.MULTILINE))
    for command in commands():
        verb, *words = command.words
        assert verb in ("foretrain", "pip", "make", "python"), command
        if verb == "pip":
            for found in re.findall(r"\[([a-z,]+)\]", command.text):
                assert set(found.split(",")) <= extras, command
        elif verb == "make":
            assert set(words) <= targets, command
        elif verb == "python":
            assert words[0] in ("-m", "-P") or (REPO / words[0]).is_file(), command


def is_slow(command: Command) -> bool:
    return command.mark == "slow" or any(option in command.words for option in TRACED)


def runnable(page: str, *, slow: bool) -> list[Command]:
    """The commands of a page that are run; all of them where slow ones are, since they build on each other."""
    listed = [c for c in commands() if c.page == page and c.runs and c.words[0] == "foretrain"]
    listed = [c for c in listed if not any(c.text.startswith(known) for known in ELSEWHERE)]
    if slow:
        return listed if any(is_slow(c) for c in listed) else []
    return [c for c in listed if not is_slow(c)]


def work(listed: list[Command], folder: Path) -> None:
    """Run them one after another in a folder that has the examples."""
    (folder / "examples").symlink_to(REPO / "examples")
    for command in listed:
        words, redirect = command.words[1:], None
        if ">" in words:
            words, redirect = words[: words.index(">")], words[words.index(">") + 1]
        result = foretrain(*words, cwd=folder if is_slow(command) else None, timeout=3600)
        assert result.returncode == 0, (command, result.stderr)
        if redirect:
            (folder / redirect).write_text(result.stdout, "utf-8")


_done: set[str] = set()  # a command that only reads need not be run for a second page


@pytest.mark.parametrize("page", [page.name for page in PAGES])
def test_commands_work(page: str, own_directory: Path) -> None:
    listed = runnable(page, slow=False)
    fresh = [c for c in listed if c.text not in _done or any(w in c.words for w in ("--write", "prepare", ">"))]
    work(fresh, own_directory)
    _done.update(command.text for command in listed)


@pytest.mark.slow
@pytest.mark.parametrize("page", [page.name for page in PAGES])
def test_slow_commands_work(page: str, own_directory: Path) -> None:
    work(runnable(page, slow=True), own_directory)


def test_what_is_not_run_says_why() -> None:
    for command in commands():
        if not command.runs:
            assert len(command.mark.split()) >= 3, command


# -- completeness ---------------------------------------------------------------------------------------------------


def test_every_command_and_exit_code_is_documented() -> None:
    text = "".join(page.read_text("utf-8") for page in PAGES)
    for name in app.members():
        assert f"foretrain {name}" in text, name
    codes = (REPO / "docs" / "schemas.md").read_text("utf-8")
    for code in ExitCode:
        assert f"| {int(code)} |" in codes
        assert code.name in command_pages.MEANINGS
    page = (REPO / "docs" / "options.md").read_text("utf-8")
    for knob in OPTIONS.values():
        assert f"`{knob.name}`" in page


def test_every_verb_has_examples_and_its_exit_codes() -> None:
    for name, command in VERBS.items():
        assert command_pages.examples(command) or " " in name, name
    groups = {name.split()[0] for name in VERBS}
    assert set(command_pages.CODES) <= groups
    assert {code for codes in command_pages.CODES.values() for code in codes} == set(ExitCode) - set(
        command_pages.ALWAYS
    )


def test_nothing_in_the_repository_names_a_machine() -> None:
    """No paths of a machine, no addresses of registries, in what git tracks."""
    listed = subprocess.run(["git", "ls-files"], cwd=REPO, capture_output=True, text=True, check=False)
    if listed.returncode:
        pytest.skip("not a git checkout")
    pattern = re.compile(
        r"/(root|home|Users|work|tmp)/[a-z]|https?://(pypi|files\.pythonhosted|registry\.npmjs|download\.pytorch)"
    )
    for name in listed.stdout.splitlines():
        path = REPO / name
        if path.suffix in (".png",) or "vendor" in path.parts or path == Path(__file__) or not path.is_file():
            continue
        content = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
        assert not pattern.search(content.decode("utf-8", "replace")), name
