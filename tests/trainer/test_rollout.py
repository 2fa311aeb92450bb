from typing import Any

import pytest
import torch

from trainer.check import check_paths
from trainer.config import PPOConfig
from trainer.data import Prompt, select
from trainer.metrics import Metrics
from trainer.models import LogProbs, NextLogits, Policy
from trainer.rollout import Rollouts, choose, generate

STOP = [2]
PROMPTS = [
    Prompt(ids, "", {}) for ids in ([1, 20, 30, 40, 50], [1, 99], [1, 7, 8, 9, 10, 11], [1, 30, 20])
]


def rolled(policy: Policy, prompts: list[Prompt] = PROMPTS, **options: Any) -> Rollouts:
    given = {"max_new_tokens": 8, "temperature": 1.0, "stop": STOP, "seed": 0} | options
    generator = torch.Generator().manual_seed(given.pop("seed"))
    return generate(policy, prompts, generator=generator, **given)


@pytest.mark.parametrize("prompts", [PROMPTS, PROMPTS[:1] * 4], ids=["unequal", "equal"])
@pytest.mark.parametrize("temperature", [0.7, 1.0])
def test_T3_logprobs_at_sampling_are_those_of_the_training_path(
    policy: Policy, prompts: list[Prompt], temperature: float
) -> None:
    many = prompts * 8
    rollouts = rolled(policy, many, temperature=temperature)
    mask = rollouts.mask
    with torch.no_grad():
        again = policy(LogProbs(rollouts.ids, rollouts.cu_seqlens, mask, temperature))
    torch.testing.assert_close(rollouts.logprobs, again, atol=1e-5, rtol=0)
    for row, prompt in enumerate(many):  # and alone
        places, ends = select(rollouts.cu_seqlens, [row])
        with torch.no_grad():
            alone = policy(LogProbs(rollouts.ids[places], ends, temperature=temperature))
        start = len(prompt.ids) - 1
        torch.testing.assert_close(
            alone[start:], rollouts.logprobs[places][start:], atol=1e-5, rtol=0
        )


def test_nearly_greedy_sampling_is_what_transformers_generates(policy: Policy) -> None:
    rollouts = rolled(policy, temperature=1e-4)
    policy.lm.set_attn_implementation("sdpa")
    for prompt, response in zip(PROMPTS, rollouts.responses(), strict=True):
        theirs = policy.lm.generate(
            torch.tensor([prompt.ids]),
            attention_mask=torch.ones(1, len(prompt.ids), dtype=torch.long),
            do_sample=False,
            max_new_tokens=8,
            eos_token_id=STOP,
            pad_token_id=0,
        )
        assert theirs[0, len(prompt.ids) :].tolist() == response


def test_T2_stop_tokens_count_in_the_response_only(policy: Policy) -> None:
    prompts = [Prompt([1, 2, 20, 2], "", {})] * 40
    rollouts = rolled(policy, prompts, stop=[2, 5, 9], temperature=2.0, max_new_tokens=60 - 15)
    assert (rollouts.lengths > 4).all()
    for response, ended in zip(rollouts.responses(), rollouts.terminated.tolist(), strict=True):
        assert not set(response[:-1]) & {2, 5, 9}
        assert ended == (response[-1] in (2, 5, 9))
    lasts = {
        r[-1] for r, ended in zip(rollouts.responses(), rollouts.terminated, strict=True) if ended
    }
    assert len(lasts) > 1
    for row in rollouts.mask.split(rollouts.lengths.tolist()):
        assert not row[:3].any() and row[3:-1].all() and not row[-1]


def test_truncated_rows_are_those_without_a_stop_token(policy: Policy) -> None:
    rollouts = rolled(policy, PROMPTS * 20, max_new_tokens=3)
    for response, ended in zip(rollouts.responses(), rollouts.terminated.tolist(), strict=True):
        assert ended == (response[-1] == 2)
        assert ended or len(response) == 3


def test_finished_rows_leave_the_batch(policy: Policy, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[int, int]] = []
    inner = Policy.forward

    def spy(self: Policy, asked: NextLogits) -> Any:
        logits = inner(self, asked)
        buffers = [buffer for pair in asked.cache.buffers.values() for buffer in pair]
        seen.append((len(asked.ids), len(logits)))
        assert {len(logits)} == {len(buffer) for buffer in buffers}
        return logits

    monkeypatch.setattr(Policy, "forward", spy)
    rollouts = rolled(policy, PROMPTS * 16, stop=list(range(2, 40)), max_new_tokens=12)
    lengths = [len(response) for response in rollouts.responses()]
    assert len(seen) == max(lengths)
    assert seen[0] == (sum(len(prompt.ids) for prompt in PROMPTS), 64)  # each prompt once
    for step, (new, rows) in enumerate(seen[1:], start=1):
        going_on = sum(length > step for length in lengths)
        assert new == rows
        assert going_on <= rows and going_on > 0.75 * rows
    assert seen[-1][1] < len(lengths)


def test_the_cache_is_allocated_once(policy: Policy, monkeypatch: pytest.MonkeyPatch) -> None:
    places: list[set[int]] = []
    inner = Policy.forward

    def spy(self: Policy, asked: NextLogits) -> Any:
        logits, pairs = inner(self, asked), asked.cache.buffers.values()
        places.append({buffer.untyped_storage().data_ptr() for p in pairs for buffer in p})
        return logits

    monkeypatch.setattr(Policy, "forward", spy)
    rolled(policy, PROMPTS * 16, stop=list(range(2, 40)), max_new_tokens=12)
    assert len(places) > 5
    assert len(places[0]) == 2 * policy.lm.config.num_hidden_layers
    assert all(place == places[0] for place in places)


def test_what_a_row_samples_does_not_depend_on_who_leaves(policy: Policy) -> None:
    """Rows in one place, once beside rows that end at once and once beside others."""
    short, long = PROMPTS[0], PROMPTS[1]
    together = rolled(policy, [long] * 4 + [short] * 12, stop=list(range(2, 30)))
    others = rolled(policy, [long] * 4 + [PROMPTS[2]] * 12, stop=list(range(2, 30)))
    assert together.responses()[:4] == others.responses()[:4]
    assert together.responses() != others.responses()


def test_a_token_is_chosen_by_its_share_of_chance() -> None:
    logits = torch.tensor([[0.25, 0.5, 0.0, 0.25]]).log().expand(6, 4)
    chance = torch.tensor([0.0, 0.2499, 0.2501, 0.7499, 0.7501, 1 - 2**-53], dtype=torch.float64)
    assert choose(logits, 1.0, chance).tolist() == [0, 0, 1, 1, 3, 3]


def test_ids_and_mask_fit_together(policy: Policy) -> None:
    rollouts = rolled(policy)
    responses = rollouts.responses()
    for ids, prompt, response in zip(rollouts.sequences(), PROMPTS, responses, strict=True):
        assert ids == prompt.ids + response
    places = rollouts.mask.nonzero().squeeze(1)
    assert rollouts.ids[places + 1].tolist() == [token for row in responses for token in row]
    assert (rollouts.logprobs[~rollouts.mask] == 0).all()


def test_only_its_generator_decides(policy: Policy) -> None:
    torch.manual_seed(5)
    before = torch.random.get_rng_state()
    first = rolled(policy)
    assert torch.equal(before, torch.random.get_rng_state())
    torch.manual_seed(6)
    assert torch.equal(first.ids, rolled(policy).ids)
    assert not torch.equal(first.ids, rolled(policy, seed=1).ids)


def test_what_is_sampled_can_be_learned_from(policy: Policy) -> None:
    rollouts = rolled(policy)
    assert not any(t.is_inference() for t in (rollouts.ids, rollouts.mask, rollouts.logprobs))


def test_samples_follow_their_distribution(policy: Policy) -> None:
    """First tokens of 4,000 samples against the model's own probabilities: chi-squared."""
    rollouts = rolled(policy, [PROMPTS[0]] * 4000, max_new_tokens=1, temperature=0.5)
    counts = torch.bincount(rollouts.ids[5::6], minlength=policy.lm.config.vocab_size)
    policy.lm.set_attn_implementation("sdpa")
    ids = torch.tensor([PROMPTS[0].ids])
    expected = 4000 * (policy.lm(input_ids=ids).logits[0, -1].detach() / 0.5).softmax(-1)
    often = expected > 5
    excess = ((counts - expected) ** 2 / expected)[often].sum().item()
    degrees = int(often.sum())
    assert degrees > 50
    assert excess < degrees + 5 * (2 * degrees) ** 0.5


def test_consistency_metrics_are_small_and_logged(policy: Policy) -> None:
    metrics = Metrics()
    rollouts = rolled(policy)
    check_paths(policy, rollouts, PPOConfig(), metrics)
    assert 0 <= metrics.mean("consistency/logprob_difference") < 1e-5
    assert metrics.mean("consistency/ratio_error_max") < 1e-4
