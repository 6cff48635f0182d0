"""`foretrain eval --tasks`: lm-eval on the run's own model equals lm-eval on the Hugging Face folder of its export."""

import importlib.util
import json
from pathlib import Path
from types import SimpleNamespace

import pytest

import foretrain as library
from foretrain.app import evaluation
from foretrain.base.errors import UserError
from foretrain.evaluation import harness
from foretrain.runs.record import TaskScore
from tests.kit.command import foretrain
from tests.kit.evaluation import TEXT, bpe, characters, trained, write_tasks

pytest.importorskip("lm_eval")
pytestmark = pytest.mark.filterwarnings("default")  # lm-eval's and datasets' own
TASKS = ["own_choices", "own_rolling", "own_written"]


@pytest.fixture(autouse=True)
def own_datasets_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "datasets")


@pytest.fixture
def own_tasks() -> Path:
    return write_tasks(Path("tasks"))


def by_metric(scores: tuple[TaskScore, ...]) -> dict[tuple[str, str], tuple[float, float | None]]:
    return {(s.task, s.metric): (s.value, s.standard_error) for s in scores}


def of_lm_eval(folder: str, include_path: Path) -> tuple[TaskScore, ...]:
    import lm_eval
    from lm_eval.tasks import TaskManager

    found = lm_eval.simple_evaluate(
        model="hf", model_args={"pretrained": folder, "dtype": "float32"}, tasks=TASKS, device="cpu", batch_size=1,
        task_manager=TaskManager(include_path=str(include_path), include_defaults=False), bootstrap_iters=1000,
        log_samples=False,
    )  # fmt: skip
    return harness.scores_of(found, {"harness": "", "through": "", "device": "cpu", "dtype": "float32", "at": ""})


@pytest.mark.parametrize(
    "recipe", ["nanogpt", *(pytest.param(recipe, marks=pytest.mark.slow) for recipe in ("llama", "nanochat"))]
)
def test_the_folder_and_the_model_itself_score_as_lm_eval_does(recipe: str, own_tasks: Path) -> None:
    pytest.importorskip("transformers")
    run = trained(recipe)
    own = library.evaluate(run, tasks=TASKS, include_path=own_tasks, device="cpu").tasks
    folder = library.export(run, "hf").path
    of_folder = library.evaluate(folder, tasks=TASKS, include_path=own_tasks, device="cpu").tasks
    assert [{s.through for s in scores} for scores in (of_folder, own)] == [{"folder"}, {"model"}]
    expected = by_metric(of_lm_eval(folder, own_tasks))
    assert {task for task, _ in expected} == set(TASKS)
    for found in (of_folder, own):
        assert by_metric(found).keys() == expected.keys()
        for key, (value, error) in by_metric(found).items():
            assert value == pytest.approx(expected[key][0], rel=1e-5), key
            assert (error is None) == (expected[key][1] is None), key
            assert error is None or error == pytest.approx(expected[key][1], rel=1e-5), key


def test_the_model_itself_writes_what_the_export_writes() -> None:
    pytest.importorskip("transformers")
    from foretrain.evaluation.adapter import OwnLM

    run = trained()
    subject = evaluation.loaded(evaluation.of_run(run, best=False), "cpu")
    own = OwnLM(subject.model, subject.words)
    theirs = harness.hugging_face(Path(library.export(run, "hf").path), "cpu", 1)
    asked = [
        SimpleNamespace(args=(prompt, {"until": until, "max_gen_toks": most}))
        for prompt in ("import ", "def f(self):\n    return", TEXT)  # the last is longer than the context
        for until, most in (([], 12), (["\n", " s"], 20), (["e"], 5))
    ]
    texts = own.generate_until(asked)
    assert texts == theirs.generate_until(asked)
    assert len(set(texts)) > 3
    assert not any("e" in text for text in texts[2::3])


@pytest.mark.parametrize(("recipe", "words"), [("modern", None), ("nanogpt", "char")])
def test_what_hugging_face_cannot_hold_goes_through_the_model(recipe: str, words: str | None, own_tasks: Path) -> None:
    if words is None:
        run, tasks = trained(recipe), TASKS
    else:
        run, tasks = trained(recipe, characters()), ["own_choices"]
        questions = [{"question": TEXT[:9], "choices": [TEXT[9:12], TEXT[30:33]], "answer": 0}]
        (own_tasks / "questions.json").write_text("".join(json.dumps(question) + "\n" for question in questions))
    found = library.evaluate(run, tasks=tasks, include_path=own_tasks, device="cpu")
    assert {score.through for score in found.tasks} == {"model"}
    assert {score.task for score in found.tasks} == set(tasks)


def test_bits_per_byte_of_a_task_are_those_of_its_texts(own_tasks: Path) -> None:
    """lm-eval's windows do not overlap, so of texts within the context they are ours of any stride."""
    run = trained("modern")
    text = "import this and that\n"
    (own_tasks / "questions.json").write_text(json.dumps({"question": text, "choices": [""], "answer": 0}) + "\n")
    rolling = own_tasks / "rolling.yaml"
    rolling.write_text(rolling.read_text().replace(
        '"{{question}} {{choices[0]}} and then something longer than the context of a tiny model, to be cut"',
        '"{{question}}"',
    ))  # fmt: skip
    Path("t.txt").write_text(text)
    assert len(bpe().encode(text.encode())) < 32
    found = library.evaluate(run, tasks="own_rolling", text="t.txt", include_path=own_tasks, device="cpu")
    assert by_metric(found.tasks)["own_rolling", "bits_per_byte"][0] == pytest.approx(
        found.texts[0].bits_per_byte, rel=1e-5
    )


def test_results_of_tasks_are_kept_and_shown(own_tasks: Path) -> None:
    trained("modern")
    words = ("eval", "out", "--tasks", "own_choices,own_rolling", "--include-path", "tasks", "--device=cpu")
    result = foretrain(*words, code=0)
    assert "own_choices" in result.stdout
    assert "on the run's own model" in result.stdout
    assert len(result.stdout.splitlines()) <= 12
    found = json.loads(foretrain(*words, "--limit=2", "--num-fewshot=0", "--batch-size=1", "--json").stdout)
    assert {(s["documents"], s["documents_in_all"]) for s in found["tasks"]} == {(2, 5)}
    shown = foretrain("explain", "out").stdout
    assert "own_choices" in shown
    assert "2 / 5" in shown


@pytest.mark.slow
def test_unknown_task_is_refused_with_the_nearest(own_tasks: Path) -> None:
    trained("modern")
    result = foretrain("eval", "out", "--tasks", "own_choices,own_choises", "--include-path", "tasks", code=2)
    assert "own_choises: lm-eval has no task of this name; the nearest are own_choices" in result.stderr
    assert foretrain("eval", "out", "--tasks", "x", "--include-path", "no-folder").returncode == 7


def test_what_a_task_lacks_is_one_sentence(own_tasks: Path) -> None:
    trained("modern")
    far, lacks, long = (own_tasks / f"{name}.yaml" for name in ("far", "lacks", "long"))
    far.write_text("task: own_far\ndataset_path: nobody/has-this\noutput_type: multiple_choice\ntest_split: test\n"
                   "doc_to_text: x\ndoc_to_target: 0\ndoc_to_choice: [a, b]\n")  # fmt: skip
    lacks.write_text((own_tasks / "choices.yaml").read_text().replace("own_choices", "own_lacks")
                     + "process_docs: !function needs.function\n")  # fmt: skip
    (own_tasks / "needs.py").write_text("import no_such_package\n")
    long.write_text((own_tasks / "written.yaml").read_text().replace("own_written", "own_long").replace("8", "32"))
    for task, code, said in (
        ("own_far", 4, "could not be downloaded from the Hugging Face Hub"),
        ("own_lacks", 4, "needs a package that is not installed (No module named 'no_such_package'"),
        ("own_long", 4, "it asks for 32 new tokens of a model with a context of 32"),
    ):
        result = foretrain(
            "eval", "out", "--tasks", f"own_choices,{task}", "--include-path", "tasks", "--device=cpu", code=code
        )
        assert said in result.stderr
        assert ("own_choices" in foretrain("explain", "out").stdout) == (task == "own_long")  # found before, so kept


@pytest.mark.slow
def test_lm_evals_own_tasks_need_the_network_or_its_cache() -> None:
    trained("modern")
    result = foretrain("eval", "out", "--tasks", "lambada_openai", code=4)
    assert "lm-eval downloads the data of its tasks" in result.stderr
    assert "lambada_openai: its data is not in the cache" in result.stderr
    foretrain("eval", "out", "--tasks", "lambada_opnai", code=2, says="lambada_openai")


def test_the_harness_is_asked_for_only_where_it_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    harness.need_harness()
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match="pip install 'foretrain\\[eval\\]'"):
        harness.need_harness()
