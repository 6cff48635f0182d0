"""Several changes together, where one is not enough, and further savings that let a run go faster: members of the
strongest set of a tier are left out as long as it fits, the most expensive first."""

from collections.abc import Iterator, Sequence

from foretrain.advice.planner import Outcome
from foretrain.advice.rules import BY_ID, RULES
from foretrain.advice.rules.base import EXACTNESS, Change, State
from foretrain.advice.search import Members, Search, Try, reduced

# Dearest first: the order in which members are left out.
_MEMBERS = sorted((rule for rule in RULES if rule.drop_order), key=lambda rule: -rule.drop_order)
EXACT, _, _ = TIERS = tuple(
    tuple(rule.id for rule in _MEMBERS if EXACTNESS.index(rule.exactness) <= most) for most in range(3)
)
TRIED_BOTH_WAYS = [rule.id for rule in sorted(_MEMBERS, key=lambda rule: rule.try_order) if rule.try_order]
LAST_RESORT = EXACT[0]
KEPT = 4
LEAST_GAIN = 0.005  # of the run's time, or of its money, by another change


def pick(rule: str, state: State) -> Change | None:
    """The change of a rule as a member of a set: the usual chunk, all blocks, nothing beside the run."""
    options = BY_ID[rule].changes(state)
    return options[BY_ID[rule].usual(options)] if options else None


def starts(search: Search) -> Iterator[tuple[tuple[str, ...], State]]:
    """The run as it is, and the same by foretrain's step where that is another one."""
    yield (), search.state
    for change in BY_ID["foretrain_step"].changes(search.state):
        yield ("foretrain_step",), change.applied(search.state)


def allowed(rule: str, state: State) -> bool:
    of_cards = BY_ID[rule].for_several if state.cluster else not BY_ID[rule].several
    return of_cards and (state.step == "foretrain" or not BY_ID[rule].ours)


def build(members: tuple[str, ...], state: State) -> State | None:
    """The run after all members; None where one of them has nothing to change."""
    order = [rule for rule in BY_ID if rule in members]
    for rule in order:
        change = pick(rule, state)
        if change is None:
            return None
        state = change.applied(state)
    return state


def smallest(search: Search, state: State) -> Outcome | None:
    options = BY_ID["micro_batch"].changes(state)
    return search.planner.outcome(options[-1].applied(state) if options else state)


def whole(search: Search, prefix: tuple[str, ...], members: tuple[str, ...], state: State) -> Try | None:
    """A set as advice, with the micro-batch as it is; None where that does not fit."""
    found = search.planner.outcome(state)
    if found is None or not found.fits or not (prefix or members):
        return None
    return search.of(prefix + tuple(rule for rule in BY_ID if rule in members), found)


def grown(search: Search, prefix: tuple[str, ...], members: tuple[str, ...], state: State) -> Try | None:
    """Return a set as advice: with the micro-batch as it is where that fits, else with the largest that does."""
    found = whole(search, prefix, members, state)
    if found is not None:
        return found
    order = tuple(rule for rule in BY_ID if rule in members)
    best = search.planner.smallest_change(state, BY_ID["micro_batch"].changes(state))
    if best is None or not best[1].fits:
        return None
    return search.of((*prefix, *order, "micro_batch"), best[1])


def strongest(search: Search, start: State, tier: tuple[str, ...]) -> tuple[tuple[str, ...], Outcome] | None:
    """The set of a tier that needs least at the smallest micro-batch: all of it, then each doubtful member left out or
    changed for its opposite, as long as that needs less."""
    usable = tuple(rule for rule in tier if allowed(rule, start) and pick(rule, start))
    members = tuple(rule for rule in usable if not any(rule in BY_ID[other].instead_of for other in usable))
    best = _least(search, start, members)
    improved = True
    while improved and not (best is not None and best[1].fits):
        improved = False
        for rule in (rule for rule in TRIED_BOTH_WAYS if rule in usable):
            held = best[0] if best else members
            opposite = tuple(other for other in usable if rule in BY_ID[other].instead_of)
            if rule in held:
                tried = tuple(member for member in held if member != rule)
            else:
                tried = tuple(
                    member for member in usable if (member in held and member not in opposite) or member == rule
                )
            found = _least(search, start, tried)
            if found is not None and (best is None or found[1].needed_bytes < best[1].needed_bytes):
                best, improved = found, True
            if best is not None and best[1].fits:
                break
    return best


def _least(search: Search, start: State, members: tuple[str, ...]) -> tuple[tuple[str, ...], Outcome] | None:
    state = build(members, start)
    found = smallest(search, state) if state else None
    return (members, found) if found else None


def fitting(search: Search, singles: Sequence[Try], alternatives: bool = True) -> list[Try]:
    """Sets that fit, of the most exact tier that has any, the cheapest first; or a smaller model with such a set.
    `singles`: every rule alone; one that fits alone is in no set. `alternatives`: where nothing fits without the last
    resort, look at other optimizers without it, too."""
    found: list[Try] = []
    enough = {c.rules for c in singles if c.fits and c.rules[-1] in TIERS[-1]}
    for prefix, start in starts(search):
        tiers = [tuple(rule for rule in tier if (*prefix, rule) not in enough) for tier in TIERS]
        own = _of_tiers(search, prefix, start, tiers)
        if alternatives and own and all(LAST_RESORT in tried.rules for tried in own):
            without = [tuple(rule for rule in tier if rule != LAST_RESORT) for tier in tiers[1:]]
            own += _of_tiers(search, prefix, start, without)
        found += own
    if not found and not enough:
        found = [made for prefix, start in starts(search) for made in _smaller_models(search, prefix, start)]
    distinct = {tried.rules: tried for tried in sorted(found, key=search.order, reverse=True)}
    cheap = sorted(distinct.values(), key=search.order)
    exact = [tried for tried in cheap[KEPT:] if tried.exactness == "exact"]
    return cheap[:KEPT] + ([] if any(c.exactness == "exact" for c in cheap[:KEPT]) else exact[:1])


def _of_tiers(search: Search, prefix: tuple[str, ...], start: State, tiers: Sequence[tuple[str, ...]]) -> list[Try]:
    def kept(members: Members, cut: bool) -> Try | None:
        state = build(members, start)
        return (grown if cut else whole)(search, prefix, members, state) if state else None

    def milder(rule: str) -> Members:
        return BY_ID[rule].instead_of if BY_ID[rule].exactness == "exact" else BY_ID[rule].milder

    for tier in tiers:
        best = strongest(search, start, tier)
        if best is not None and best[1].fits:
            return reduced(best[0], kept, milder, (False, True))
    return []


def _smaller_models(search: Search, prefix: tuple[str, ...], start: State) -> Iterator[Try]:
    """The least change of the model that lets the strongest exact set fit."""
    best = strongest(search, start, EXACT)
    if best is None:
        return
    members, least = best
    cut = least.state.config.batch_size < start.config.batch_size
    rules = (*prefix, *(rule for rule in BY_ID if rule in members), *(["micro_batch"] if cut else []))
    for rule in ("pretrained", "block_size", "n_layer", "n_embd"):
        found = search.planner.smallest_change(least.state, BY_ID[rule].changes(least.state))
        if found and found[1].fits:
            yield search.of((*rules, rule), found[1])


def faster(search: Search, gaining: list[str], rounds: int = 4) -> list[Try]:
    """The best improvement again and again, from the run as it is; `gaining`: rules to look at."""
    found: list[Try] = []
    rules: tuple[str, ...] = ()
    state = search.state
    best = search.ratio(search.base) if not search.must_fit else None
    for _ in range(rounds):
        usable = [rule for rule in gaining if rule not in rules and allowed(rule, state)]
        chosen = _fastest(search, rules, state, usable, None if best is None else best - LEAST_GAIN)
        if chosen is None:
            break
        best, rules, state = search.ratio(chosen.outcome), chosen.rules, chosen.state
        if len(rules) > 1:
            found.append(chosen)
    return found


def _fastest(
    search: Search, rules: tuple[str, ...], state: State, usable: Sequence[str], most: float | None
) -> Try | None:
    """Return one rule more: the one with the lowest ratio (at most `most`), by its fastest option that fits."""
    reach: list[tuple[float, int, list[Change]]] = []
    for number, rule in enumerate(usable):
        options = list(BY_ID[rule].changes(state))
        made = [search.planner.outcome(change.applied(state)) for change in options]
        ratios = [ratio for each in made if each and (ratio := search.ratio(each)) is not None]
        if ratios and (most is None or min(ratios) <= most):
            reach.append((min(ratios), number, options))
    best: tuple[float, int, Try] | None = None
    for low, number, options in sorted(reach, key=lambda each: each[:2]):
        if best and best[:2] < (low, number):
            break
        change = search.planner.fastest(state, options)
        ratio = search.ratio(change[1]) if change else None
        if change is None or ratio is None or (most is not None and ratio > most):
            continue
        if best is None or (ratio, number) < best[:2]:
            best = ratio, number, search.of((*rules, usable[number]), change[1])
    return best[2] if best else None
