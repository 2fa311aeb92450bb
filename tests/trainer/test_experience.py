import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import make_rollouts
from torch import Tensor

from trainer import ppo
from trainer.check import check_sums
from trainer.config import PPOConfig, UserError
from trainer.data import Prompt, packed
from trainer.experience import Experience, make_experience
from trainer.models import LogProbs
from trainer.rollout import Rollouts
from trainer.scoring import (
    RewardPart,
    Scaling,
    load_function,
    load_rewards,
    score,
    short_names,
    source_file,
)

CONFIG = PPOConfig(gamma=1.0, gae_lambda=0.5, temperature=0.7)
REF = {7: -1.5, 8: -0.5, 9: -2.0}  # log-probs of the reference by token


def reference(asked: LogProbs) -> Tensor:
    """Stands for a model; nothing but the tokens that are chosen decides."""
    assert asked.temperature == CONFIG.temperature and asked.mask is not None  # T3
    return torch.tensor([REF.get(i, 99.0) for i in [*asked.ids.tolist()[1:], 0]]) * asked.mask


def critic(ids: Tensor, cu_seqlens: Tensor, mask: Tensor) -> Tensor:
    """The value of a state is a tenth of the token that ends it, where it is to be read."""
    return torch.where(mask, ids / 10, torch.nan)


def experience(
    rollouts: Rollouts, scores: list[float], kl_coef: float = 0.1, **options: Any
) -> Experience:
    given: Any = (reference, critic)
    return make_experience(
        rollouts, torch.tensor(scores), *given, replace(CONFIG, **options), kl_coef
    )


def test_T1_values_are_read_at_the_token_before_the_action() -> None:
    """Prompt [5], response [7, 8, 9]: V(s_t) = .5, .7, .8 and the value behind 9 is not used."""
    x = experience(make_rollouts([[5, 7, 8, 9]], [1], [True]), [2.0])
    torch.testing.assert_close(x.values[:3], torch.tensor([0.5, 0.7, 0.8]))
    # KL per token: -1 - ref = .5, -.5, 1; rewards -.1 * KL, and the score on the last
    torch.testing.assert_close(x.kl, torch.tensor([0.5, -0.5, 1.0, 0.0]))
    torch.testing.assert_close(x.rewards, torch.tensor([-0.05, 0.05, 1.9, 0.0]))
    # deltas: -.05 + .7 - .5 = .15; .05 + .8 - .7 = .15; 1.9 + 0 - .8 = 1.1
    # A_3 = 1.1; A_2 = .15 + .5 * 1.1 = .7; A_1 = .15 + .5 * .7 = .5
    torch.testing.assert_close((x.returns - x.values)[:3], torch.tensor([0.5, 0.7, 1.1]))
    # the critic's targets come from these; what the policy sees is whitened
    raw = torch.tensor([0.5, 0.7, 1.1])
    torch.testing.assert_close(x.advantages[:3], (raw - raw.mean()) / (raw.var() + 1e-8).sqrt())
    assert x.mask.tolist() == [True, True, True, False]


def test_T1_with_a_longer_prompt_between_others() -> None:
    """The same response behind [1, 1, 5], between two rows: the same numbers in its own places."""
    rows = [[5, *[7] * 9], [1, 1, 5, 7, 8, 9], [5, 8]]
    x = experience(make_rollouts(rows, [1, 3, 1], [True] * 3), [9.0, 2.0, -9.0])
    torch.testing.assert_close((x.returns - x.values)[12:15], torch.tensor([0.5, 0.7, 1.1]))
    assert (x.advantages[10:12] == 0).all()
    assert x.advantages[15] == 0


def test_A6_the_score_lands_once_on_the_end_token() -> None:
    """Response [7, 8, 9] with the end token 9: place 2 chose it, behind it stands the next row."""
    x = experience(make_rollouts([[5, 7, 8, 9], [5, 7]], [1, 1], [True] * 2), [3.0, 0.0])
    torch.testing.assert_close(x.rewards, torch.tensor([-0.05, 0.05, 2.9, 0.0, -0.05, 0.0]))
    torch.testing.assert_close(x.rewards[:4].sum(), 3.0 - 0.1 * x.kl[:4].sum())


def test_terminal_truncation_ends_there() -> None:
    x = experience(make_rollouts([[5, 7]], [1], [False]), [2.0], truncation="terminal")
    torch.testing.assert_close(x.returns[0], torch.tensor(1.95))  # 2 - .1 * .5


def test_bootstrap_truncation_goes_on_with_the_value_behind_the_last_token() -> None:
    rollouts = make_rollouts([[5, 7], [5, 8, 7], [5, 7]], [1, 1, 1], [False, False, True])
    x = experience(rollouts, [2.0, 2.0, 2.0], truncation="bootstrap")
    last = x.returns[[0, 3, 5]]
    torch.testing.assert_close(last, torch.tensor([1.95 + 0.7, 1.95 + 0.7, 1.95]))


def test_dropped_truncation_learns_nothing_from_the_row() -> None:
    rollouts = make_rollouts([[5, 7], [5, 8, 9]], [1, 1], [False, True])
    x = experience(rollouts, [2.0, 1.0], truncation="drop")
    assert not x.mask[:2].any()
    assert (x.rewards[:2] == 0).all()
    alone = experience(make_rollouts([[5, 8, 9]], [1], [True]), [1.0])
    torch.testing.assert_close(x.advantages[2:], alone.advantages)
    check_sums(rollouts, x, 0.1)


def test_rows_are_those_asked_for() -> None:
    rows = [[5, 7], [5, 8, 9], [5, 7, 7, 9]]
    x = experience(make_rollouts(rows, [1, 1, 1], [True] * 3), [0.0, 1.0, 2.0])
    part = x.rows([1, 0])
    assert part.ids.tolist() == [5, 8, 9, 5, 7]
    assert part.cu_seqlens.tolist() == [0, 3, 5]
    assert part.mask.tolist() == [True, True, False, True, False]
    torch.testing.assert_close(part.returns, x.returns[[2, 3, 4, 0, 1]])
    assert part.scores.tolist() == [1.0, 0.0]


def constant(value: float) -> Any:
    return lambda rollouts: torch.full((len(rollouts.prompts),), value)


def test_a_score_is_a_weighted_sum_less_the_penalty() -> None:
    rollouts = make_rollouts([[5, 7], [5, 9]], [1, 1], [False, True])
    parts = [RewardPart("a", 2.0, constant(3.0)), RewardPart("b", -0.5, constant(4.0))]
    total, each = score(parts, rollouts, missing_eos_penalty=1.5)
    assert total.tolist() == [2.5, 4.0]
    assert {name: part.tolist() for name, part in each.items()} == {"a": [3.0] * 2, "b": [4.0] * 2}


def test_a_reward_model_reads_the_end_token(trained: dict, tokenizer: Any) -> None:
    """A truncated response gets the end token that training had; its neighbours are not read."""
    rewards = {trained["reward_model"]: 1.0}
    (part,) = load_rewards(rewards, tokenizer, torch.device("cpu"), 1024)
    ids = tokenizer("the film is good").input_ids
    ended = make_rollouts([[*ids, 2]], [2], [True])
    cut = make_rollouts([ids, ids * 2], [2, 2], [False, False])
    torch.testing.assert_close(part.score(ended)[0], part.score(cut)[0])
    assert part.model is not None
    whole = part.model(*packed([[*ids, 2]]))
    torch.testing.assert_close(part.score(ended)[0], whole[-1])


def test_a_reward_model_reads_its_end_token_behind_another_stop_token(
    trained: dict, tokenizer: Any
) -> None:
    """A chat template's stop token ended the response; in training the EOS stood behind it."""
    (part,) = load_rewards({trained["reward_model"]: 1.0}, tokenizer, torch.device("cpu"), 1024)
    ids = tokenizer("the film is good").input_ids
    stopped = make_rollouts([[*ids, 9], [*ids, 2]], [2, 2], [True, True])
    assert part.model is not None
    whole = part.model(*packed([[*ids, 9, 2], [*ids, 2]]))
    expected = torch.stack([whole[len(ids) + 1], whole[-1]])
    torch.testing.assert_close(part.score(stopped), expected)


def test_what_is_not_learned_from_does_not_move_the_scale() -> None:
    """A sequence without a response token, and one that is dropped, get no score."""
    rollouts = make_rollouts([[5, 7], [5], [5, 9], [5, 9]], [1] * 4, [False, False, True, True])
    given = torch.tensor([1e6, -1e6, 1.0, 3.0])
    parts = [RewardPart("a", 1.0, lambda _: given)]
    scaling = Scaling("mean_std", None)
    total, _ = score(parts, rollouts, 0.0, scaling, drop_truncated=True)
    assert total.tolist()[2:] == [-1.0, 1.0]
    assert scaling.moments.tolist() == [2.0, 4.0, 10.0]
    scaling = Scaling("mean_std", None)
    score(parts, rollouts, 0.0, scaling)
    assert scaling.moments[0] == 3


def test_a_sequence_without_a_response_token_gets_no_score() -> None:
    """Packed between two others, which have what they have alone."""
    rows, ends = [[5, 7], [5, 6], [5, 8, 9]], [True, False, True]
    x = experience(make_rollouts(rows, [1, 2, 1], ends), [1.0, 100.0, 2.0])
    y = experience(make_rollouts(rows[::2], [1, 1], [True, True]), [1.0, 2.0])
    assert (x.rewards[2:4] == 0).all() and not x.mask[2:4].any()
    for name in ("rewards", "advantages", "mask", "kl"):
        kept = getattr(x, name)[[0, 1, 4, 5, 6]]
        torch.testing.assert_close(kept, getattr(y, name))


def test_a_reward_function_gets_texts_and_columns(tokenizer: Any, tmp_path: Any) -> None:
    path = tmp_path / "mine.py"
    path.write_text(
        "import json, pathlib\n"
        "def f(prompts, completions, **columns):\n"
        "    seen = json.dumps([prompts, completions, columns])\n"
        "    pathlib.Path(__file__).with_suffix('.json').write_text(seen)\n"
        "    return [float(len(c)) for c in completions]\n"
    )
    (part,) = load_rewards({f"{path}:f": 1.0}, tokenizer, torch.device("cpu"), 64)
    start, end = (
        tokenizer("the film").input_ids,
        tokenizer(" is", add_special_tokens=False).input_ids,
    )
    rollouts = make_rollouts([[*start, *end, 2], [*start, 2]], [len(start)] * 2, [True, True])
    rollouts.prompts = [Prompt(start, "the film", {"stars": 5}), Prompt(start, "x", {"year": 1})]
    assert part.name == "f"
    assert part.score(rollouts).tolist() == [3.0, 0.0]
    columns = {"stars": [5, None], "year": [None, 1]}
    seen = json.loads((tmp_path / "mine.json").read_text())
    assert seen == [["the film", "x"], [" is", ""], columns]


@pytest.mark.parametrize(
    ("body", "sentence"),
    [
        ("return 1.0", "a list of 1 numbers, and returned a float: 1.0"),
        ("return [1.0, 2.0]", r"a list of 1 numbers, and returned 2 in a list: \[1.0, 2.0\]"),
        ("return [float('nan')]", "not finite"),
        ("return [-1e39]", r"not finite in float32: \[-1e\+39\]"),
        ("return [10**400]", "must return a list of 1 numbers"),
        ("return ['good']", "must return a list of 1 numbers"),
        ("return [None]", "must return a list of 1 numbers"),
    ],
)
def test_a_reward_function_that_misbehaves(
    tokenizer: Any, tmp_path: Any, body: str, sentence: str
) -> None:
    path = tmp_path / "mine.py"
    path.write_text(f"def f(prompts, completions):\n    {body}\n")
    (part,) = load_rewards({f"{path}:f": 1.0}, tokenizer, torch.device("cpu"), 64)
    with pytest.raises(UserError, match=sentence):
        part.score(make_rollouts([[5, 7]], [1], [True]))


@pytest.mark.parametrize(
    ("columns", "sentence"),
    [
        ({}, "missing a required argument: 'stars'"),
        ({"stars": 5, "year": 1}, "got an unexpected keyword argument 'year'"),
        ({"stars": 5, "prompts": 1}, "multiple values for argument 'prompts'"),
    ],
)
def test_columns_that_do_not_fit_a_reward_function(
    tokenizer: Any, tmp_path: Any, columns: dict[str, Any], sentence: str
) -> None:
    path = tmp_path / "mine.py"
    path.write_text("def f(prompts, completions, stars):\n    return [1.0] * len(stars)\n")
    (part,) = load_rewards({f"{path}:f": 1.0}, tokenizer, torch.device("cpu"), 64)
    rollouts = make_rollouts([[5, 7]], [1], [True])
    rollouts.prompts = [Prompt([5], "x", {"stars": 5})]
    assert part.score(rollouts).tolist() == [1.0]
    rollouts.prompts = [Prompt([5], "x", columns)]
    with pytest.raises(UserError, match=rf"mine\.py:f: {sentence}.* columns"):
        part.score(rollouts)


@pytest.mark.parametrize(
    ("source", "sentence"),
    [
        ("no_such_module:f", "cannot be imported"),
        ("no_such_file.py:f", "cannot be imported"),
        ("math:no_such_name", "has no function 'no_such_name'"),
        ("math:pi", "has no function 'pi'"),
        (":f", "cannot be imported"),
    ],
)
def test_a_reward_function_that_is_not_there(source: str, sentence: str) -> None:
    with pytest.raises(UserError, match=sentence):
        load_function(source)


FAR = ("a", "b", "runs/one", "runs/two", "runs/f", "odd:name", "dir/odd:name")


@pytest.mark.parametrize(
    ("sources", "names"),
    [
        (["runs/one/model"], ["model"]),
        (["runs/one/model", "runs/two/model"], ["one/model", "two/model"]),
        (["runs/one/model", "./runs/two/model", "x"], ["one/model", "two/model", "x"]),
        (["a.py:f"], ["f"]),
        (["a.py:f", "b.py:f"], ["a.py:f", "b.py:f"]),
        (["a/r.py:f", "b/r.py:f", "b/r.py:g"], ["a/r.py:f", "b/r.py:f", "g"]),
        (["math:sqrt", "cmath:sqrt"], ["math:sqrt", "cmath:sqrt"]),
        (["pkg.one.mod:f", "pkg.two.mod:f"], ["one.mod:f", "two.mod:f"]),
        (["runs/f", "a.py:f"], ["runs/f", "a.py:f"]),
        (["odd:name"], ["odd:name"]),
        (["odd:name", "dir/odd:name", "a.py:name"], ["{here}/odd:name", "dir/odd:name", "name"]),
    ],
)
def test_rewards_are_told_apart_by_the_shortest_ends_that_differ(
    sources: list[str], names: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for folder in FAR:
        (tmp_path / folder).mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert short_names(sources) == [name.format(here=tmp_path.name) for name in names]


def test_one_reward_twice_is_refused() -> None:
    with pytest.raises(UserError, match=r"two rewards are the same: runs/a, runs/b/\.\./a"):
        short_names(["runs/a", "runs/b/../a"])


def test_what_exists_as_a_folder_is_a_folder(trained: dict, tokenizer: Any, tmp_path: Path) -> None:
    folder = shutil.copytree(trained["reward_model"], tmp_path / "model:2")
    (part,) = load_rewards({str(folder): 1.0}, tokenizer, torch.device("cpu"), 64)
    assert part.name == "model:2" and part.model is not None
    assert (
        ppo.inputs(PPOConfig(model="m", train="t", rewards={str(folder): 1.0}))[f"reward {folder}"]
        == folder
    )


def test_a_reward_function_gets_copies(tokenizer: Any, tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    path.write_text(
        "def f(prompts, completions, notes):\n"
        "    for prompt, note in zip(prompts, notes):\n"
        "        prompt.append({'role': 'assistant', 'content': 'x'})\n"
        "        prompt[0]['content'] = 'y'\n"
        "        note['seen'].append(1)\n"
        "    count = len(completions)\n"
        "    completions.clear()\n"
        "    return [float(len(prompts[0]) + len(notes[0]['seen']))] * count\n"
    )
    (part,) = load_rewards({f"{path}:f": 1.0}, tokenizer, torch.device("cpu"), 64)
    rollouts = make_rollouts([[5, 7], [5, 8]], [1, 1], [True, True])
    asked = [{"role": "user", "content": "a"}]
    rollouts.prompts = [Prompt([5], asked, {"notes": {"seen": []}}) for _ in range(2)]
    for _ in range(2):
        assert part.score(rollouts).tolist() == [3.0, 3.0]
    assert asked == [{"role": "user", "content": "a"}]
    assert rollouts.prompts[0].columns == {"notes": {"seen": []}}


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        ("def f(:\n", r"cannot be imported: SyntaxError: invalid syntax \(mine\.py, line 1\)"),
        ("x = 1\nx.y\n", r"AttributeError: 'int' object .* \(.*mine\.py, line 2\)"),
        ("import sys\nsys.exit(3)\n", r"SystemExit: 3 \(.*mine\.py, line 2\)"),
        ("\x00", "cannot be imported: "),
    ],
)
def test_a_reward_file_that_cannot_be_imported(
    content: str, sentence: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mine.py").write_text(content)
    monkeypatch.syspath_prepend(tmp_path)
    for source in (f"{tmp_path}/mine.py:f", "mine:f"):
        for load in (load_function, source_file):
            if load is load_function or source == "mine:f":
                with pytest.raises(UserError, match=sentence):
                    load(source)


@pytest.mark.parametrize("weights", [{"large": 1e9}, {"large": 1.0, "small": 1.0}])
def test_a_sum_of_rewards_that_float32_does_not_hold_is_refused(weights: dict) -> None:
    rollouts = make_rollouts([[5, 7]], [1], [True])
    parts = [RewardPart(n, w, lambda _: torch.tensor([3e38])) for n, w in weights.items()]
    with pytest.raises(UserError, match=r"sum of the rewards is not finite.* large up to 3e\+38"):
        score(parts, rollouts, 0.0)


def test_a_reward_model_with_another_vocabulary_is_refused(trained: dict, tokenizer: Any) -> None:
    tokenizer = type(tokenizer).from_pretrained(trained["model"])
    tokenizer.add_tokens(["unheard of"])
    with pytest.raises(UserError, match="another vocabulary"):
        load_rewards({trained["reward_model"]: 1.0}, tokenizer, torch.device("cpu"), 64)
