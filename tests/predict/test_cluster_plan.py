"""Plans for several cards: what is asked, what each strategy takes, and whether more cards pay."""

import json
import re
import sys

import pytest

import foretrain as library
from foretrain.base.errors import UserError
from foretrain.base.quantities import parse_limit
from foretrain.config.options import RunConfig
from foretrain.config.shape import ModelShape
from foretrain.config.sharing import STRATEGIES, Sharing, config_of_rank
from foretrain.hardware.catalogue import find
from foretrain.hardware.cluster import Cluster, cluster
from foretrain.predict.largest import largest
from foretrain.predict.plan import SCHEMA, plan
from foretrain.predict.pretraining import of_cluster
from foretrain.predict.ranks import ClusterPlan, NcclMemory, of_run
from foretrain.predict.spec import StepSpec
from foretrain.predict.speed.ranks import BUCKET_BYTES, RankTime, largest_share, rank_time, sharings
from foretrain.predict.speed.time import step_time
from foretrain.predict.within import spent_of, within
from tests.kit.command import REPO, first_screen, foretrain, refused

sys.path.insert(0, str(REPO / "benchmarks"))
import cluster_measured

GPT2 = RunConfig(batch_size=8, gradient_accumulation_steps=64)
PAIR = "2 x RTX 4090"


# -- who shares what ----------------------------------------------------------------------------------------------


def test_ranks_share_the_micro_batches_of_a_step() -> None:
    for world in (1, 2, 8, 64):
        assert config_of_rank(GPT2, world).tokens_per_step * world == GPT2.tokens_per_step


def test_world_that_does_not_divide_names_the_nearest_tokens() -> None:
    with refused("config.ranks_indivisible_near") as found:
        config_of_rank(RunConfig(batch_size=12, gradient_accumulation_steps=1, block_size=64), 8)
    assert "8 (6,144)" in str(found.value)
    with pytest.raises(UserError) as found:
        config_of_rank(RunConfig(batch_size=12, gradient_accumulation_steps=2, block_size=64), 8)
    assert "--batch_size=3 --gradient_accumulation_steps=8" in str(found.value)
    assert int(found.value.exit_code) == 2


# -- which cards --------------------------------------------------------------------------------------------------

TEXTS = {
    "2 x RTX 4090": ("2 x RTX 4090", "pcie4x16", None, ()),
    "2x4090": ("2 x RTX 4090", "pcie4x16", None, ()),
    "2×RTX 4090": ("2 x RTX 4090", "pcie4x16", None, ()),
    "RTX 4090 x 2": ("2 x RTX 4090", "pcie4x16", None, ()),
    "4090 + 4090": ("2 x RTX 4090", "pcie4x16", None, ()),
    "2 x TITAN Xp": ("2 x TITAN Xp", "pcie3x16-p2p", None, ()),
    "8 x H100 SXM5": ("8 x H100 SXM5 80GB", "h100-sxm5", None, ()),
    "2 nodes x 8 x A100 SXM4 80GB": ("2 nodes x 8 x A100 SXM4 80GB", "a100-sxm4", ("ib-200", 8), ()),
    "2 nodes of 4 x H100 SXM5": ("2 nodes x 4 x H100 SXM5 80GB", "h100-sxm5", ("ib-400", 4), ()),
    "2 nodes x 8 x A100": ("2 nodes x 8 x A100 SXM4 40GB", "a100-sxm4", ("ib-200", 8), ("card",)),
    "16 x H100 SXM5": ("2 nodes x 8 x H100 SXM5 80GB", "h100-sxm5", ("ib-400", 8), ("nodes",)),
    "2 nodes x 2 x 4090": ("2 nodes x 2 x RTX 4090", "pcie4x16", ("tcp-10", 1), ("network",)),
}


@pytest.mark.parametrize("text", TEXTS)
def test_a_text_names_cards_with_their_usual_links(text: str) -> None:
    said, link, network, assumed = TEXTS[text]
    found = cluster(text)
    assert (found.text, found.link.name, found.assumed) == (said, link, assumed)
    assert (found.network and (found.network.name, found.nics_per_node)) == network


def test_a_count_alone_is_of_the_card_that_is_named_elsewhere() -> None:
    assert cluster("2", here=lambda: find("RTX 3090")).text == "2 x RTX 3090"
    with pytest.raises(UserError, match="such as"):
        cluster("2")


REFUSED = {
    "RTX 4090 + RTX 3090": "usage.mixed_cards",
    "4090,3090": "usage.mixed_cards",
    "1 x 4090 + 2 x 3090": "usage.mixed_cards",
    "1 x 4090": "usage.one_card_cluster",
    "99999 x 4090": "usage.too_many_ranks",
    "2 x M4 Max": "usage.cluster_of_cuda",
    "2 x no such card": "gpu.unknown_name",
    "2 x RTX 4091": "gpu.unknown_name_near",
    **dict.fromkeys(
        ("", "x", "4090", "0 x 4090", "-2 x 4090", "2.5 x 4090", "2 nodes", "0 nodes x 2 x 4090", "2 x"), "usage.gpus"
    ),
}


@pytest.mark.parametrize("text", REFUSED)
def test_what_is_no_cluster_is_refused(text: str) -> None:
    with refused(REFUSED[text], code=2) as found:
        cluster(text)
    assert str(found.value)


def test_unlike_cards_are_refused_with_the_reason() -> None:
    with pytest.raises(UserError, match=r"wait for the RTX 3060 12GB.*11\.63 GiB.*2 x RTX 3060 12GB"):
        cluster("RTX 4090 + RTX 3060")


@pytest.mark.parametrize(
    ("text", "link", "network", "id"),
    [
        (PAIR, "nvlink", "", "gpu.no_nvlink"),
        (PAIR, "pci4x8", "", "gpu.unknown_link"),
        (PAIR, "ib-200", "", "gpu.other_link"),
        (PAIR, "pcie5x16", "", "gpu.slower_bus"),
        (PAIR, "a100-bridge", "", "gpu.no_bridge"),
        (PAIR, "", "ib-200", "usage.network_of_one"),
        ("4 x RTX 3090", "nvlink", "", "gpu.bridge_of_two"),
        ("2 nodes x 2 x 4090", "", "token ring", "gpu.unknown_link"),
        ("2 nodes x 2 x 4090", "", "pcie4x8", "gpu.other_link"),
    ],
)
def test_links_that_these_cards_cannot_have_are_refused(text: str, link: str, network: str, id: str) -> None:
    with refused(id):
        cluster(text, link, network)


def test_links_go_by_name_alias_and_number_of_nics() -> None:
    assert cluster(PAIR, "PCIe 4.0 x8").link.name == "pcie4x8"
    assert cluster("2 x RTX 3090", "nvlink").link.name == "geforce-bridge"
    assert cluster("8 x A100 SXM4 80GB", "nvlink").link.name == "a100-sxm4"
    found = cluster("2 nodes x 8 x A100 SXM4 80GB", "", "4 x ndr")
    assert (found.network and found.network.name, found.nics_per_node) == ("ib-400", 4)


# -- how long -----------------------------------------------------------------------------------------------------


def time_of(strategy: str, cards: Cluster, config: RunConfig = GPT2, **more: bool) -> RankTime:
    sharing = Sharing(strategy=strategy, world=cards.world, per_node=cards.per_node, **more)  # type: ignore[arg-type]
    own = config_of_rank(config, cards.world)
    found = rank_time(StepSpec.of(own, cards.gpu, sharing=sharing), sharing, cards)
    assert found is not None
    return found


def sent(time: RankTime, what: str) -> tuple[int, int, float]:
    found = next(each for each in time.communication if each.what == what)
    return found.calls, found.size_bytes, found.busy_s


def test_what_is_sent_is_what_each_strategy_says() -> None:
    """P parameters, n micro-batches of a rank: DDP 4P a step; ZeRO-1 4P more; FSDP 2P once or twice and 4P, n times."""
    cards, params = cluster("8 x A100 SXM4 80GB"), ModelShape.of(GPT2).n_params
    n, groups = GPT2.gradient_accumulation_steps // 8, 1 + GPT2.n_layer
    assert sent(time_of("ddp", cards), "gradients")[1] == 4 * params
    assert sent(time_of("zero1", cards), "updated")[1] == 4 * params
    for strategy, gathers in (("fsdp", 2), ("fsdp_no_reshard", 1)):
        time = time_of(strategy, cards)
        assert [each.what for each in time.communication].count("weights_backward") == gathers - 1
        assert sent(time, "weights_forward")[:2] == (n * groups, n * 2 * params)
        assert sent(time, "gradients")[:2] == (n * groups, n * 4 * params)
        assert sent(time_of(strategy, cards, syncs_each=False), "gradients")[:2] == (groups, 4 * params)
    nodes = cluster("2 nodes x 8 x A100 SXM4 80GB")
    assert sent(time_of("hsdp", nodes, syncs_each=False), "gradients_between")[:2] == (groups, 4 * params)


def test_large_sum_takes_the_ring_formula_and_half_is_hidden() -> None:
    """A wide model over slow links: 2 (n - 1) / n x bytes / bandwidth, of which a step waits for what does not fit."""
    cards = cluster("4 x RTX 4090", "pcie3x4")
    config = RunConfig(n_layer=4, n_head=16, n_embd=4096, batch_size=1, gradient_accumulation_steps=4, compile=False)
    time, params = time_of("ddp", cards, config), ModelShape.of(config).n_params
    _, size_bytes, busy_s = sent(time, "gradients")
    assert size_bytes == 4 * params
    assert busy_s == pytest.approx(2 * 3 / 4 * size_bytes / cards.link.bytes_per_s, rel=0.02)
    assert 0.5 * busy_s < time.waits_s.expected_s < busy_s
    assert time.step_s.expected_s == pytest.approx(time.compute_s.expected_s + time.waits_s.expected_s)


def test_more_accumulation_hides_more_and_worse_links_hide_less() -> None:
    def share(accumulation: int, link: str) -> float:
        config = GPT2.model_copy(update={"gradient_accumulation_steps": accumulation})
        return time_of("ddp", cluster(PAIR, link), config).waiting_share

    assert share(2, "pcie4x16") > share(8, "pcie4x16") > share(64, "pcie4x16")
    assert share(8, "pcie4x4") > share(8, "pcie4x8") > share(8, "pcie4x16") > share(8, "pcie4x16-p2p")


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_ranges_hold_what_is_expected_and_the_worst_link(strategy: str) -> None:
    for text in (PAIR, "2 nodes x 4 x A100 SXM4 80GB"):
        cards = cluster(text)
        if strategy == "hsdp" and cards.nodes == 1:
            continue
        time = time_of(strategy, cards)
        assert time.step_s.low_s < time.step_s.expected_s < time.step_s.high_s
        assert time.waits_s.low_s <= time.waits_s.expected_s <= time.waits_s.high_s
    usual = step_time(StepSpec.of(GPT2, find("RTX 4090")))
    assert usual is not None
    far = time_of("ddp", cluster(PAIR), GPT2.model_copy(update={"gradient_accumulation_steps": 2}))
    assert far.waits_s.high_s > 2.5 * far.waits_s.expected_s  # 3.8 of 10 GB/s


def test_a_huge_bandwidth_leaves_one_cards_share_of_the_work() -> None:
    cards = cluster("8 x B200 SXM")
    config = GPT2.model_copy(update={"compile": False})
    alone, shared = step_time(StepSpec.of(config, cards.gpu)), time_of("ddp", cards, config)
    assert 7.5 < alone.expected_s / shared.step_s.expected_s < 8


def test_zero1_deals_out_whole_tensors() -> None:
    assert largest_share([4, 4, 4, 4], 4) == 0.25
    assert largest_share([10, 1, 1], 2) == pytest.approx(10 / 12)
    numels = [p.numel for p in ModelShape.of(GPT2).parameters()]
    assert largest_share(numels, 1024) == pytest.approx(max(numels) / sum(numels))


def test_buckets_are_as_large_as_ddp_makes_them() -> None:
    calls, size_bytes, _ = sent(time_of("ddp", cluster(PAIR)), "gradients")
    assert size_bytes / BUCKET_BYTES - 1 < calls < size_bytes / BUCKET_BYTES + 3 or calls < size_bytes / BUCKET_BYTES


def test_hsdp_needs_several_nodes_of_several_cards() -> None:
    names = {sharing.strategy for sharing in sharings(cluster(PAIR), 1)}
    assert names == {"ddp", "zero1", "fsdp", "fsdp_no_reshard"}
    both = sharings(cluster("2 nodes x 2 x 4090"), 4)
    assert ("hsdp", False) in {(sharing.strategy, sharing.syncs_each) for sharing in both}
    assert all(sharing.syncs_each for sharing in both if sharing.strategy in ("ddp", "zero1"))


# -- the plan -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def pair() -> ClusterPlan:
    return library.plan("gpt2-124m", gpus=PAIR)


def test_a_plan_is_whole_and_goes_through_json(pair: ClusterPlan) -> None:
    assert ClusterPlan.from_json(json.dumps(pair.to_json(schema=SCHEMA))) == pair
    assert pair.chosen == "ddp"
    assert pair.verdict == "fits"
    assert pair.one_card.work.tokens_per_step == 2 * pair.micro_batches * 8 * 1024
    best = pair.best
    assert best.timing.tokens_per_s == pytest.approx(524_288 / best.timing.step_s.expected_s)
    assert "2 x RTX 4090" in str(pair)


def test_money_and_energy_are_those_of_all_cards(pair: ClusterPlan) -> None:
    rented = library.plan("gpt2-124m", gpus=PAIR, price_per_hour=0.5)
    best, same = rented.best, pair.best
    assert best.timing.rent_expected == pytest.approx(2 * 0.5 * best.timing.total_s.expected_s / 3600)
    assert pair.one_card.timing is not None
    alone = pair.one_card.timing
    assert 1.8 < same.timing.power.expected_w / alone.power.expected_w <= 2.0
    assert pair.pays.more_money == pytest.approx((same.timing.cost_expected or 0) - (alone.cost_expected or 0))


def test_nccls_memory_is_in_what_a_card_needs(pair: ClusterPlan) -> None:
    for rank in pair.ranks:
        phase = rank.memory.neediest
        without = phase.needed_expected_bytes - rank.nccl.expected_bytes
        assert phase.allocated_bytes < without
        assert rank.nccl.low_bytes < rank.nccl.expected_bytes < rank.nccl.high_bytes
    switch = NcclMemory.of(cluster("8 x H100 SXM5"), Sharing(strategy="ddp", world=8, per_node=8))
    assert switch.low_bytes > pair.ranks[0].nccl.high_bytes


def test_sharding_needs_less_of_a_card_the_more_there_are() -> None:
    needs = {}
    for count in (2, 8):
        plan = library.plan("gpt2-124m", gpus=f"{count} x A100 SXM4 80GB", batch_size=4, compile=False)
        needs[count] = {rank.id: rank.memory.worst.allocated_bytes for rank in plan.ranks}
    assert needs[8]["fsdp"] < needs[2]["fsdp"] < needs[2]["zero1"] < needs[2]["ddp"]
    assert needs[8]["ddp"] == needs[2]["ddp"]


def test_only_what_one_card_cannot_hold_is_needed() -> None:
    wide = {"n_layer": 2, "n_head": 64, "n_embd": 8192, "batch_size": 1, "gradient_accumulation_steps": 8}
    plan = library.plan({**wide, "compile": False}, gpus="8 x RTX 4090")
    assert plan.one_card.verdict_of("foretrain") == "does_not_fit"
    assert plan.best.strategy.startswith("fsdp")
    assert plan.pays.word == "needed"
    assert {rank.strategy: rank.verdict for rank in plan.ranks}["ddp"] == "does_not_fit"


def test_what_helps_was_planned_and_pays() -> None:
    plan = library.plan("gpt2-124m", gpus=PAIR, gradient_accumulation_steps=2)
    assert plan.pays.word in ("little", "link_decides")
    change = next(each for each in plan.pays.changes if each.what == "accumulation")
    again = library.plan("gpt2-124m", gpus=PAIR, gradient_accumulation_steps=change.accumulation)
    assert again.pays.word == "pays"
    same = next(rank for rank in again.ranks if rank.strategy == change.strategy and rank.syncs_each)
    assert same.speed_up == change.speed_up
    # Of several micro-batches FSDP can hold back the sums until the last one, which with one there is nothing to.
    assert again.best.speed_up.expected >= change.speed_up.expected
    fewer = library.plan("gpt2-124m", gpus=PAIR, gradient_accumulation_steps=change.accumulation // 2)
    assert fewer.pays.word != "pays"


def test_batch_size_auto_takes_the_largest_that_fits_every_rank() -> None:
    small = {"n_layer": 2, "compile": False, "block_size": 1024}
    plan = library.plan({**small, "batch_size": "auto", "total_batch_size": 131_072}, gpus=PAIR)
    assert plan.verdict == "fits"
    assert plan.config.tokens_per_step == 131_072
    larger = plan.config.batch_size * 2
    with_larger = library.plan({**small, "batch_size": larger, "gradient_accumulation_steps": 128 // larger}, gpus=PAIR)
    assert with_larger.verdict != "fits"


@pytest.mark.parametrize("recipe", ["nanogpt", "modern", "llama"])
def test_every_family_is_planned(recipe: str) -> None:
    optimizer = {"optimizer": "adamw"} if recipe != "nanogpt" else {}
    plan = library.plan("baby", gpus=PAIR, recipe=recipe, gradient_accumulation_steps=2, compile=False, **optimizer)
    assert plan.verdict == "fits"
    assert {rank.strategy for rank in plan.ranks} == {"ddp", "zero1", "fsdp", "fsdp_no_reshard"}
    assert all(rank.time for rank in plan.ranks)


# -- the command --------------------------------------------------------------------------------------------------


def test_first_screen_says_what_fits_and_whether_it_pays() -> None:
    result = first_screen("plan", "gpt2-124m", "--gpus", PAIR, most_lines=19)
    said = " ".join(result.stdout.split())
    assert "Fits with DDP: a card needs" in said
    assert "The second card pays:" in said
    assert "times (1." in said
    for label in ("time", "cost", "link", "next", "assumed"):
        assert f"\n  {label} " in result.stdout
    assert "foretrain train gpt2-124m --gpus 2" in said
    assert "estimated range" in said


def test_what_fits_is_never_said_to_need_more_than_a_card_has() -> None:
    """FSDP that holds gradients back would use more than the card has, and runs: the allocator frees what it only
    keeps."""
    words = (
        "plan",
        "gpt2-774m",
        "--gpus",
        "2 x RTX 3090",
        "--batch_size=8",
        "--strategy=fsdp_no_reshard",
        "--hold_gradients=true",
    )
    shown = foretrain(*words).stdout
    assert "in the 23.56 GiB of a card it may run out of memory" in " ".join(shown.split())
    rows = re.findall(
        r"^  (?:DDP|ZeRO|FSDP).*? +(fits|tight|may not fit|does not fit) +([\d.]+) of ([\d.]+) GiB", shown, re.MULTILINE
    )
    assert len(rows) == 4
    for verdict, needs, free in rows:
        assert (float(needs) <= float(free)) == (verdict != "does not fit")
    assert "24 GiB (with more memory 24 GiB)" in foretrain(*words, "--oneline").stdout


@pytest.mark.parametrize("form", ["--full", "--oneline", "--json"])
def test_other_forms(form: str) -> None:
    result = foretrain("plan", "gpt2-124m", "--gpus", PAIR, form, code=0)
    if form == "--json":
        assert json.loads(result.stdout)["schema"] == SCHEMA
    elif form == "--oneline":
        assert result.stdout.count("\n") == 1
        assert "times one card" in result.stdout
    else:
        assert "Communication" in result.stdout
        assert "reduce-scatter" in result.stdout


@pytest.mark.parametrize(
    "run", [["gpt2-124m", "--compile=False"], ["llama-3.2-1b", "--method=lora"], ["llama-3.2-1b", "--inference"]]
)
def test_a_count_of_several_cards_is_planned_on_each(run: list[str]) -> None:
    both = json.loads(foretrain("plan", *run, "--gpus", "2", "--gpu", "4090,3060", "--json").stdout)["plans"]
    for made, card in zip(both, ("RTX 4090", "RTX 3060 12GB"), strict=True):
        alone = json.loads(foretrain("plan", *run, "--gpus", f"2 x {card}", "--json").stdout)
        assert made["needed_bytes"] > 0
        assert made == {key: alone[key] for key in made}


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--gpus", PAIR, "--best"], "--best needs a limit"),
        (["--gpus", PAIR, "--logged-mfu", "30"], "--logged-mfu answers for one card"),
        (["--gpus", PAIR, "--trainer", "nanogpt"], "leave out --trainer"),
        (["--gpus", PAIR, "--largest", "batch_size", "--exact"], "leave --exact out"),
        (["--inference", "--gpus", PAIR, "--per-node=2"], "leave out --per-node"),
        (["--inference", "--gpus", PAIR, "--world=2"], "leave out --world"),
        (["--gpus", PAIR, "--gpu", "3090"], "name the card once"),
        (["--gpu", PAIR], "--gpus '2 x RTX 4090'"),
        (["--link", "nvlink"], "give --gpus"),
        (["--gpus", PAIR, "--strategy=hsdp"], "several nodes"),
        (["--gpus", PAIR, "--optimizer=muon", "--strategy=fsdp"], "whole"),
        (["--gpus", PAIR, "--eval_only=true"], "eval_only trains nothing"),
        (["--gpus", "3 x RTX 4090"], "63 (516,096)"),
        (["--gpus", "2", "--gpu", "4090,3060", "--step-time", "9"], "speed of one device"),
        (["--gpus", "2", "--gpu", "4090,3060", "--write-job", "slurm"], "--write-job answer for one card"),
        (["--gpus", "2", "--smallest-card", "--logged-mfu", "30"], "--logged-mfu"),
    ],
)
def test_nonsense_on_several_cards_is_refused_in_a_sentence(words: list[str], said: str) -> None:
    result = foretrain("plan", "gpt2-124m", *words, code=2)
    assert said in " ".join(result.stderr.split())
    assert not result.stdout


def test_check_exits_with_3_where_no_strategy_fits() -> None:
    words = (
        "gpt2-124m",
        "--gpus",
        PAIR,
        "--batch_size=64",
        "--gradient_accumulation_steps=8",
        "--compile=false",
        "--check",
    )
    foretrain("plan", *words, code=3, says="does not fit on 2 x RTX 4090")
    assert foretrain("plan", "gpt2-124m", "--gpus", PAIR, "--check").returncode == 0


# -- published runs -----------------------------------------------------------------------------------------------


def test_the_record_of_published_runs_is_whole() -> None:
    rows = cluster_measured.cases()
    assert len({row["id"] for row in rows}) == len(rows) >= 100
    for row in rows:
        config, cards = cluster_measured.config_of(row), cluster(row["cards"])
        assert row["source"]
        assert row["strategy"] in STRATEGIES
        assert config.gradient_accumulation_steps % cards.world == 0
        assert float(row["value"]) > 0


def test_published_times_are_met_as_the_page_says() -> None:
    """A few of each kind: all are in benchmarks/results/cluster_measured.json."""
    wanted = {"mne-005", "nc-002", "tt-028", "lf-168", "lf-033", "lf-212", "lf-104", "fm-234"}
    rows = [cluster_measured.compare(row) for row in cluster_measured.cases() if row["id"] in wanted]
    assert len(rows) == len(wanted)
    assert all(row["in_range"] for row in rows)
    assert sorted(abs(row["error"]) for row in rows)[len(rows) // 2] < 0.15


@pytest.mark.parametrize("text", ["12h", "3kWh", "2EUR"])
def test_steps_within_a_limit_fit_and_one_more_does_not(text: str, pair: ClusterPlan) -> None:
    limit = parse_limit(text)
    found = within(of_cluster(pair), limit)
    again = library.plan(found.plan.config, gpus=PAIR)  # type: ignore[union-attr]
    assert found.plan.timing == again.timing
    assert found.plan.pays.saved_s == again.pays.saved_s  # type: ignore[union-attr]
    spent = found.plan.timing
    more = within(of_cluster(pair), limit.model_copy(update={"amount": limit.amount * 1.01}))
    assert found.steps_cautious < found.steps < more.steps
    assert spent_of(spent.total_s, spent, limit, "expected") <= limit.amount  # type: ignore[arg-type]


def test_largest_value_fits_several_cards_and_next_does_not(pair: ClusterPlan) -> None:
    found = largest(of_cluster(pair), "batch_size")
    assert found.value
    assert found.value > pair.config.batch_size
    alone = library.plan(pair.config, gpus=PAIR, batch_size=found.value)
    assert alone.verdict == "fits"
    assert library.plan(pair.config, gpus=PAIR, batch_size=found.value + 1).verdict != "fits"


def test_a_limit_of_several_cards_is_written_as_a_config() -> None:
    words = ("plan", "gpt2-124m", "--gpus", PAIR, "--tokens", "1B", "--write", "mine.toml", "--json")
    shown = json.loads(foretrain(*words).stdout)
    steps = shown["steps"]
    assert steps == shown["plan"]["one_card"]["config"]["max_iters"] == int(1e9) // 524_288
    assert (
        json.loads(foretrain("plan", "mine.toml", "--gpus", PAIR, "--json").stdout)["one_card"]["work"]["steps"]
        == steps
    )


def test_several_cards_are_not_told_of_a_graph() -> None:
    """One card of these would have one, and that is what the plan begins from."""
    words = ["plan", "baby", "--gradient_accumulation_steps=2"]
    said = "is one CUDA graph"
    assert said in " ".join(foretrain(*words, "--gpu", "RTX 4090", "--full").stdout.split())
    assert said not in " ".join(foretrain(*words, "--gpus", PAIR, "--full").stdout.split())
    asked = foretrain(*words, "--gpus", PAIR, "--full", "--cuda-graph=on").stdout
    assert "cuda_graph has no effect here: several ranks share the run" in " ".join(asked.split())
    made = plan(RunConfig(n_embd=128, n_head=4, batch_size=4, gradient_accumulation_steps=2), find("RTX 4090"))
    assert "one_graph" in {note.id for note in made.notes}
    assert "one_graph" not in {note.id for note in of_run(made, 2, 2).notes}


def test_several_cards_are_explained_and_take_the_step_of_a_log() -> None:
    words = ("plan", "gpt2-124m", "--gpus", PAIR)
    made = json.loads(foretrain(*words, "--json").stdout)
    found = json.loads(foretrain(*words, "--explain", "--observed", "9GiB", "--json").stdout)
    (phase,) = found["phases"]
    assert phase["memory"]["needed_expected_bytes"] == made["needed_bytes"]
    assert sum(each["size_bytes"] for each in phase["sums"]) == phase["memory"]["allocated_bytes"]
    assert "buckets" in {each["id"] for each in phase["sums"]}
    assert [line["high_bytes"] for line in found["lines"] if line["id"] == "card"] == [9 << 30]
    timed = json.loads(foretrain(*words, "--step-time", "2.1", "--json").stdout)
    assert timed["timing"]["source"] == "measured (log)"
    assert timed["timing"]["tokens_per_s"] == pytest.approx(timed["one_card"]["work"]["tokens_per_step"] / 2.1)
    shared = next(rank for rank in timed["ranks"] if rank["strategy"] == "ddp")
    assert shared["speed_up"]["expected"] == pytest.approx(
        timed["one_card"]["foretrain_timing"]["step_s"]["expected_s"] / 2.1
    )
