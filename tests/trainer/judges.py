"""Functions that judge responses in tests."""


def length(prompts: list[str], completions: list[str], **columns: list) -> list[float]:
    return [float(len(text)) for text in completions]
